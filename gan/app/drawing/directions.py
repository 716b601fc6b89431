"""Directions in which w changes a picture much: from a StyleGAN2's weights, or from many w."""

from typing import Literal

import torch
from torch import Tensor

from gan.app.drawing.drawer import Drawer
from gan.app.drawing.projection import some_w
from nets.stylegan import StyleGenerator
from nets.stylegan_layers import ModulatedConv

Way = Literal["weights", "pca"]


def directions(drawer: Drawer, way: Way) -> Tensor:
    """Steps of w [N, W], the most important direction first: each is as long as w's standard deviation along it."""
    known = some_w(drawer)
    vectors = by_weights(drawer.styled()) if way == "weights" else by_pca(known)
    return vectors * (known.cpu() @ vectors.T).std(0)[:, None]


def by_weights(net: StyleGenerator) -> Tensor:
    """Directions to which the convolutions' styles answer most: Shen and Zhou 2021 (SeFa), for all layers together."""
    return _main(torch.cat([layer.affine.weight for layer in net.modules() if isinstance(layer, ModulatedConv)]))


def by_pca(known: Tensor) -> Tensor:
    """Directions in which the w of many pictures differ most: Härkönen et al. 2020 (GANSpace)."""
    return _main(known - known.mean(0))


def _main(rows: Tensor) -> Tensor:
    """The right singular vectors, the largest value first. The largest element of each is positive."""
    vectors = torch.linalg.svd(rows.detach().cpu().double(), full_matrices=False).Vh
    return (vectors.gather(1, vectors.abs().argmax(1, keepdim=True)).sign() * vectors).float()
