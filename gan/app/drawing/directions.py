"""Directions in which w changes a picture much: from a StyleGAN2's weights, or from many w."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gan.app.drawing.drawer import Drawer
from gan.app.drawing.latents import Latent
from gan.app.drawing.projection import some_w
from nets.stylegan import StyleGenerator
from nets.stylegan_layers import ModulatedConv


@dataclass(frozen=True)
class Directions:
    """Unit vectors [N, W], the most important one first, and the standard deviation of w along each."""

    vectors: Tensor
    deviations: Tensor

    def edited(self, latent: Latent, number: int, strength: float) -> Latent:
        """The latent, so many standard deviations of w further in a direction."""
        return replace(latent, w=latent.w + strength * self.deviations[number] * self.vectors[number])


def by_weights(net: StyleGenerator) -> Tensor:
    """Directions to which the convolutions' styles answer most: Shen and Zhou 2021 (SeFa), for all layers together."""
    convolutions = [layer for layer in net.modules() if isinstance(layer, ModulatedConv)]
    return _main(torch.cat([layer.affine.weight for layer in convolutions]))


def by_pca(known: Tensor) -> Tensor:
    """Directions in which the w of many pictures differ most: Härkönen et al. 2020 (GANSpace)."""
    return _main(known - known.mean(0))


def directions(drawer: Drawer, way: Literal["weights", "pca"]) -> Directions:
    known = some_w(drawer)
    vectors = by_weights(drawer.net) if way == "weights" else by_pca(known)
    return Directions(vectors, (known.cpu() @ vectors.T).std(0))


def _main(rows: Tensor) -> Tensor:
    """The right singular vectors, the largest value first. The largest element of each is positive."""
    vectors = torch.linalg.svd(rows.detach().cpu().double(), full_matrices=False).Vh
    signs = vectors.gather(1, vectors.abs().argmax(1, keepdim=True)).sign()
    return (signs * vectors).float()
