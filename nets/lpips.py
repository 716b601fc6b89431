"""LPIPS: how far two pictures look from each other, by what a network trained on ImageNet sees in them."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.models import VGG16_Weights

from gan.files.disk import load_plain
from nets.vgg import Vgg19, load


class Vgg16(Vgg19):
    """The features relu1_2 to relu5_3 of VGG-16."""

    relus, called, configuration = (3, 8, 15, 22, 29), "VGG-16", "D"


class Lpips(nn.Module):
    """The distance of pictures from -1 to 1 by Zhang et al. 2018, frozen.

    The trunk normalises, except in version 0.0. `weights` are the published numbers that
    weigh its features: lin0.model.1.weight and so on. With ones in their place all features count alike.
    """

    def __init__(self, trunk: Vgg19, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.trunk = trunk
        for number in range(len(trunk.relus)):
            # Squared differences times w are those of features times the root of w.
            root = weights[f"lin{number}.model.1.weight"].to(torch.get_default_dtype()).sqrt()
            self.register_buffer(f"root{number}", root, persistent=False)

    def embed(self, image: Tensor) -> list[Tensor]:
        """Features of each size, fine to coarse, whose squared differences are the distance."""
        # The norm, and not the root of a sum: its gradient is finite where all features are zero.
        return [
            x * (self.get_buffer(f"root{number}") / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 1e-10))
            for number, x in enumerate(self.trunk(image[:, :3].expand(-1, 3, -1, -1)))
        ]

    def layerwise(self, one: Tensor, other: Tensor) -> list[Tensor]:
        """The distances at each place of each layer."""
        pairs = zip(self.embed(one), self.embed(other), strict=True)
        return [(a - b).square().sum(1, keepdim=True) for a, b in pairs]

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """The distance of each pair of pictures, [B, 1, 1, 1]."""
        return torch.stack([layer.mean((2, 3), keepdim=True) for layer in self.layerwise(one, other)]).sum(0)


def load_lpips(weights: str | Mapping[str, Tensor]) -> Lpips:
    """LPIPS 0.1 by VGG-16, of a file as in `load_vgg19`, or as given. torchmetrics has what weighs its features."""
    spec = find_spec("torchmetrics")
    assert spec is not None and spec.origin is not None
    lins = load_plain(Path(spec.origin).parent / "functional" / "image" / "lpips_models" / "vgg.pth")
    if not isinstance(weights, str):
        return Lpips(Vgg16(weights, True), lins)
    return load(weights, VGG16_Weights.IMAGENET1K_V1, Vgg16.called, lambda state: Lpips(Vgg16(state, True), lins))
