"""R3GAN's networks: residual blocks without any normalisation."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nets.blocks import SLOPE


class R3Block(nn.Module):
    """The residual block of Huang et al. 2024 (R3GAN): 1x1, grouped 3x3, 1x1, an inverted bottleneck.

    Nothing is normalised. As in Fix-up (Zhang et al. 2019), the last layer starts at zero, so each block starts as
    its shortcut. The other layers start the smaller, the more blocks the network has (`depth`). Only layers before
    an activation have a bias.
    """

    def __init__(self, channels: int, expansion: int, group: int, depth: int) -> None:
        super().__init__()
        wide = channels * expansion
        self.widen = nn.Conv2d(channels, wide, 1)
        self.mix = nn.Conv2d(wide, wide, 3, padding=1, groups=wide // min(group, wide))
        self.narrow = nn.Conv2d(wide, channels, 1, bias=False)
        # Fix-up's factor is depth ** (-1 / (2m - 2)), with m = 3 layers in a branch.
        for layer in (self.widen, self.mix):
            kaiming_(layer, depth**-0.25)
        nn.init.zeros_(self.narrow.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.widen(x), SLOPE)
        y = F.leaky_relu(self.mix(y), SLOPE)
        return x + self.narrow(y)


class R3Generator(nn.Module):
    """A picture from a latent vector: a learned 4x4 start, scaled by the latent, is doubled several times.

    `widths` are the channels at each size from 4x4 up: four of them make 32 pixels. Each size has `blocks` residual
    blocks.
    """

    def __init__(
        self,
        latent: int = 64,
        widths: Sequence[int] = (768, 768, 768, 768),
        blocks: int = 2,
        expansion: int = 2,
        group: int = 16,
    ) -> None:
        super().__init__()
        self.latent = latent
        self.basis = nn.Parameter(torch.randn(widths[0], 4, 4))
        self.modulate = nn.Linear(latent, widths[0], bias=False)
        kaiming_(self.modulate, SQUARE_ROOT_OF_HALF)
        self.stages = _stages(widths, blocks, expansion, group)
        self.paint = nn.Conv2d(widths[-1], 3, 1, bias=False)
        kaiming_(self.paint, SQUARE_ROOT_OF_HALF)

    def forward(self, z: Tensor) -> Tensor:
        """A picture. Its values have no bounds; the network learns to keep them between -1 and 1."""
        x = self.basis * self.modulate(z)[:, :, None, None]
        for number, stage in enumerate(self.stages):
            if number:
                x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = stage(x)
        return self.paint(x)


class R3Discriminator(nn.Module):
    """A score for each picture: halved down to 4x4, then a depthwise convolution and a linear layer.

    The score has no bias, because a loss of differences would cancel it.
    """

    def __init__(
        self, widths: Sequence[int] = (768, 768, 768, 768), blocks: int = 2, expansion: int = 2, group: int = 16
    ) -> None:
        super().__init__()
        down = list(reversed(widths))
        self.see = nn.Conv2d(3, down[0], 1, bias=False)
        kaiming_(self.see, 1.0)
        self.stages = _stages(down, blocks, expansion, group)
        self.look = nn.Conv2d(down[-1], down[-1], 4, groups=down[-1], bias=False)
        self.score = nn.Linear(down[-1], 1, bias=False)
        for layer in (self.look, self.score):
            kaiming_(layer, SQUARE_ROOT_OF_HALF)

    def forward(self, image: Tensor) -> Tensor:
        """Scores [B]."""
        x = self.see(image)
        for number, stage in enumerate(self.stages):
            if number:
                # Halving bilinearly is the same as the mean of each 2x2 square.
                x = F.avg_pool2d(x, 2)
            x = stage(x)
        return self.score(self.look(x).flatten(1)).squeeze(1)


SQUARE_ROOT_OF_HALF = 0.5**0.5


def _stages(widths: Sequence[int], blocks: int, expansion: int, group: int) -> nn.ModuleList:
    """For each width its residual blocks, after a 1x1 where the width changes."""
    stages = nn.ModuleList()
    for before, after in pairwise((widths[0], *widths)):
        layers: list[nn.Module] = []
        if before != after:
            layer = nn.Conv2d(before, after, 1, bias=False)
            kaiming_(layer, SQUARE_ROOT_OF_HALF)
            layers.append(layer)
        layers += [R3Block(after, expansion, group, depth=blocks * len(widths)) for _ in range(blocks)]
        stages.append(nn.Sequential(*layers))
    return stages


def kaiming_(layer: nn.Conv2d | nn.Linear, gain: float) -> None:
    """Normal weights that keep the variance through a leaky ReLU (He et al. 2015), times `gain`. Biases are 0."""
    nn.init.kaiming_normal_(layer.weight, SLOPE)
    with torch.no_grad():
        layer.weight.mul_(gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
