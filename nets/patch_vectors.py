"""CUT's network of patches (Park et al. 2020): vectors of features at some places of a picture."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from nets.blocks import start_


class PatchVectors(nn.Module):
    """A perceptron of two layers for each layer of features, whose outputs have length one. The published `length`
    is 256, and the published names are those of F, `mlp_sample`.

    The published network is made in its first forward. Here the channels of the features are given.
    """

    def __init__(self, channels: Sequence[int], length: int = 256) -> None:
        super().__init__()
        for number, inside in enumerate(channels):
            layers = nn.Sequential(nn.Linear(inside, length), nn.ReLU(inplace=True), nn.Linear(length, length))
            self.add_module(f"mlp_{number}", layers)
        start_(self, xavier=True)

    def forward(self, features: Sequence[Tensor], places: Sequence[Tensor]) -> list[Tensor]:
        """For each layer the vectors [B, P, length] at P places, which are numbers of pixels, row by row."""
        found = []
        for layer, each, where in zip(self.children(), features, places, strict=True):
            vectors = layer(each.flatten(2).index_select(2, where).transpose(1, 2))
            found.append(vectors / (torch.linalg.vector_norm(vectors, dim=2, keepdim=True) + 1e-7))
        return found
