"""WGAN-GP's residual networks for small pictures (Gulrajani et al. 2017, for CIFAR-10), of any widths.

The generator has batch norm, the critic no norm at all.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nets.norm import SyncBatchNorm


class UpBlock(nn.Module):
    """Norm, ReLU, doubling, 3x3, norm, ReLU and 3x3; the shortcut is a doubled 1x1 (Gulrajani et al. 2017).

    No convolution has a bias, because a later norm would cancel it.
    """

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([SyncBatchNorm(inside), SyncBatchNorm(outside)])
        self.first = _conv(inside, outside, 3, 2**0.5, bias=False)
        self.second = _conv(outside, outside, 3, 2**0.5, bias=False)
        self.shortcut = _conv(inside, outside, 1, 1.0, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.interpolate(F.relu(self.norms[0](x)), scale_factor=2)
        y = self.second(F.relu(self.norms[1](self.first(y))))
        return y + F.interpolate(self.shortcut(x), scale_factor=2)


class DownBlock(nn.Module):
    """ReLU, 3x3, ReLU, 3x3 and halving by means; the shortcut is a halved 1x1. There is no norm.

    The penalty is on the gradient at each picture. With a batch norm it would depend on the other pictures (section 4).
    """

    def __init__(self, inside: int, outside: int, first: bool = False) -> None:
        super().__init__()
        self.is_first = first  # it reads the picture, which must not go through a ReLU
        self.first = _conv(inside, outside, 3, 2**0.5)
        self.second = _conv(outside, outside, 3, 2**0.5)
        self.shortcut = _conv(inside, outside, 1, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x if self.is_first else F.relu(x))
        y = self.second(F.relu(y))
        return F.avg_pool2d(y, 2) + self.shortcut(F.avg_pool2d(x, 2))


class WganGenerator(nn.Module):
    """A picture from a latent vector: a linear layer to 4x4, doublings, a norm, and tanh.

    `widths` are the channels at each size from 4x4 up: four of them make 32 pixels.
    """

    def __init__(self, latent: int = 128, widths: Sequence[int] = (128, 128, 128, 128)) -> None:
        super().__init__()
        self.latent = latent
        self.start = nn.Linear(latent, 16 * widths[0])
        _spread_(self.start, 1.0)
        self.blocks = nn.ModuleList(UpBlock(*pair) for pair in pairwise(widths))
        self.norm = SyncBatchNorm(widths[-1])
        self.paint = _conv(widths[-1], 3, 3, 1.0)

    def forward(self, z: Tensor) -> Tensor:
        """A picture between -1 and 1."""
        x = self.start(z).unflatten(1, (-1, 4, 4))
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.paint(F.relu(self.norm(x))))


class WganCritic(nn.Module):
    """A score for each picture: halvings down to 4x4, the mean over all pixels, a linear layer.

    The score has no bias, because a loss of differences would cancel it.
    """

    def __init__(self, widths: Sequence[int] = (128, 128, 128, 128)) -> None:
        super().__init__()
        down = list(reversed(widths))
        self.blocks = nn.ModuleList(
            DownBlock(*pair, first=number == 0) for number, pair in enumerate(pairwise((3, *down[1:])))
        )
        self.score = nn.Linear(down[-1], 1, bias=False)
        _spread_(self.score, 1.0)

    def forward(self, image: Tensor) -> Tensor:
        """Scores [B]."""
        x = image
        for block in self.blocks:
            x = block(x)
        return self.score(F.relu(x).mean((2, 3))).squeeze(1)


def _conv(inside: int, outside: int, kernel: int, gain: float, bias: bool = True) -> nn.Conv2d:
    layer = nn.Conv2d(inside, outside, kernel, padding=kernel // 2, bias=bias)
    _spread_(layer, gain)
    return layer


def _spread_(layer: nn.Conv2d | nn.Linear, gain: float) -> None:
    """Uniform weights of variance gain**2 / inputs (He et al. 2015 have the gain of a ReLU). Biases are 0."""
    inputs = layer.weight[0].numel()
    nn.init.uniform_(layer.weight, -gain * (3 / inputs) ** 0.5, gain * (3 / inputs) ** 0.5)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
