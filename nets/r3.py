"""R3GAN's networks (Huang et al. 2024): residual blocks without any normalisation.

The names of modules and parameters are the published ones, so a published state dict fits, without its "Model.".
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nets.blocks import SLOPE, convolve, doubled, filtered, middle, taps

GAIN = (2 / (1 + SLOPE**2)) ** 0.5  # keeps the variance through a leaky ReLU: He et al. 2015


class Convolution(nn.Module):
    """A convolution that keeps the size, without a bias of its own."""

    def __init__(self, before: int, after: int, kernel: int = 1, groups: int = 1, gain: float = 1.0) -> None:
        super().__init__()
        self.Layer = nn.Conv2d(before, after, kernel, padding=kernel // 2, groups=groups, bias=False)
        normal_(self.Layer, gain)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        layer = self.Layer
        return convolve(x, layer.weight, bias, padding=layer.kernel_size[0] // 2, groups=layer.groups)


class Bias(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.Bias = nn.Parameter(torch.zeros(channels))


class R3Block(nn.Module):
    """1x1, grouped 3x3, 1x1: an inverted bottleneck beside a shortcut.

    Nothing is normalised. As in Fix-up (Zhang et al. 2019), the last layer starts at zero, so each block starts as
    its shortcut. The other layers start the smaller, the more blocks the network has (`depth`).
    """

    def __init__(self, channels: int, expansion: int, groups: int, depth: int) -> None:
        super().__init__()
        wide = channels * expansion
        # Fix-up's factor is depth ** (-1 / (2m - 2)), with m = 3 layers in a branch.
        gain = GAIN * depth**-0.25
        self.LinearLayer1 = Convolution(channels, wide, gain=gain)
        self.LinearLayer2 = Convolution(wide, wide, 3, groups, gain)
        self.LinearLayer3 = Convolution(wide, channels, gain=0)
        self.NonLinearity1, self.NonLinearity2 = Bias(wide), Bias(wide)

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.LinearLayer1(x, self.NonLinearity1.Bias), SLOPE, inplace=True)
        y = F.leaky_relu(self.LinearLayer2(y, self.NonLinearity2.Bias), SLOPE, inplace=True)
        return x + self.LinearLayer3(y)


class Resampler(nn.Module):
    """Doubles or halves pictures with a smooth filter. Beyond the border they are zero."""

    def __init__(self, up: bool) -> None:
        super().__init__()
        self.up = up
        self.register_buffer("Kernel", taps())

    def forward(self, x: Tensor) -> Tensor:
        return doubled(x) if self.up else filtered(x, 1, 2)


class Resample(nn.Module):
    """Between two stages: resampled, and to another width where they differ, on the smaller side."""

    def __init__(self, before: int, after: int, up: bool) -> None:
        super().__init__()
        self.Resampler = Resampler(up)
        self.LinearLayer = nn.Identity() if before == after else Convolution(before, after)

    def forward(self, x: Tensor) -> Tensor:
        if self.Resampler.up:
            return self.Resampler(self.LinearLayer(x))
        return self.LinearLayer(self.Resampler(x))


class FromVector(nn.Module):
    """A learned 4x4 start, each channel scaled by the vector."""

    def __init__(self, length: int, channels: int) -> None:
        super().__init__()
        self.Basis = nn.Parameter(torch.randn(channels, 4, 4))
        self.LinearLayer = nn.Linear(length, channels, bias=False)
        normal_(self.LinearLayer)

    def forward(self, x: Tensor) -> Tensor:
        return self.Basis * self.LinearLayer(x)[:, :, None, None]


class ToVector(nn.Module):
    """A 4x4 convolution of each channel by itself, then a linear layer."""

    def __init__(self, channels: int, length: int) -> None:
        super().__init__()
        self.Basis = nn.Conv2d(channels, channels, 4, groups=channels, bias=False)
        self.LinearLayer = nn.Linear(channels, length, bias=False)
        normal_(self.Basis)
        normal_(self.LinearLayer)

    def forward(self, x: Tensor) -> Tensor:
        return self.LinearLayer(self.Basis(x).flatten(1))


class Stage(nn.Module):
    """The blocks of one size, and the layer that comes before or after them. In bfloat16 if `low` says so."""

    def __init__(self, layers: Sequence[nn.Module], low: bool) -> None:
        super().__init__()
        self.Layers = nn.Sequential(*layers)
        self.low = low

    def forward(self, x: Tensor) -> Tensor:
        if self.low:
            with torch.autocast(x.device.type, torch.bfloat16):
                return self.Layers(x.bfloat16())
        return self.Layers(x.float() if x.dtype is torch.bfloat16 else x)


def _stages(
    layers: Sequence[nn.Module], widths: Sequence[int], groups: Sequence[int], blocks: int, expansion: int, low: int
) -> nn.Sequential:
    """The stages of a network: `layers` are those between its sizes, which come before the blocks where it draws.

    So many of the largest sizes as `low` says compute in bfloat16. Without `groups` these have 16 channels.
    """
    draws, found = isinstance(layers[0], FromVector), []
    groups = groups or [max(1, width * expansion // 16) for width in widths]
    for number, (layer, width, group) in enumerate(zip(layers, widths, groups, strict=True)):
        inside = [R3Block(width, expansion, group, blocks * len(widths)) for _ in range(blocks)]
        is_low = number >= len(widths) - low if draws else number < low
        found.append(Stage([layer, *inside] if draws else [*inside, layer], is_low))
    return nn.Sequential(*found)


class R3Generator(nn.Module):
    """A picture from a latent vector, and where there are `classes` from a vector of labels [B, classes].

    `widths` are the channels at each size from 4x4 up: four of them make 32 pixels. Each size has `blocks` residual
    blocks with `groups` (by default of 16 channels). A `size` (height, width) that no doubling reaches is the middle of
    the square drawn. `low`: so many of the largest sizes compute in bfloat16.
    """

    def __init__(
        self,
        latent: int = 64,
        widths: Sequence[int] = (768, 768, 768, 768),
        blocks: int = 2,
        expansion: int = 2,
        groups: Sequence[int] | None = None,
        classes: int = 0,
        embedding: int = 64,
        channels: int = 3,
        size: tuple[int, int] | None = None,
        low: int = 0,
    ) -> None:
        super().__init__()
        self.latent, self.channels, self.classes, self.size = latent, channels, classes, size
        start = FromVector(latent + (embedding if classes else 0), widths[0])
        layers = [start, *(Resample(before, after, up=True) for before, after in pairwise(widths))]
        self.MainLayers = _stages(layers, widths, groups or (), blocks, expansion, low)
        self.AggregationLayer = Convolution(widths[-1], channels)
        if classes:
            self.EmbeddingLayer = nn.Linear(classes, embedding, bias=False)
            normal_(self.EmbeddingLayer)

    def forward(self, z: Tensor, label: Tensor | None = None) -> Tensor:
        """A picture. Its values have no bounds; the network learns to keep them between -1 and 1."""
        if self.classes:
            z = torch.cat([z, self.EmbeddingLayer(label)], 1)
        x = self.AggregationLayer(self.MainLayers(z).to(z.dtype))
        return x if self.size is None else middle(x, *self.size)


class R3Discriminator(nn.Module):
    """A score for each picture: halved down to 4x4, then a depthwise convolution and a linear layer.

    The score has no bias, because a loss of differences would cancel it. With `classes`, the score is the product of a
    vector of the picture and one of its label. The settings are those of the generator.
    """

    def __init__(
        self,
        widths: Sequence[int] = (768, 768, 768, 768),
        blocks: int = 2,
        expansion: int = 2,
        groups: Sequence[int] | None = None,
        classes: int = 0,
        embedding: int | None = None,
        channels: int = 3,
        low: int = 0,
    ) -> None:
        super().__init__()
        self.classes, self.side = classes, 4 * 2 ** (len(widths) - 1)
        embedding = embedding or widths[0]
        down, groups = widths[::-1], (groups or ())[::-1]
        layers: list[nn.Module] = [Resample(before, after, up=False) for before, after in pairwise(down)]
        layers.append(ToVector(down[-1], embedding if classes else 1))
        self.ExtractionLayer = Convolution(channels, down[0])
        self.MainLayers = _stages(layers, down, groups, blocks, expansion, low)
        if classes:
            self.EmbeddingLayer = nn.Linear(classes, embedding, bias=False)
            normal_(self.EmbeddingLayer, embedding**-0.5)

    def forward(self, image: Tensor, label: Tensor | None = None) -> Tensor:
        """Scores [B]."""
        x = self.MainLayers(self.ExtractionLayer(middle(image, self.side, self.side))).to(image.dtype)
        if self.classes:
            x = x * self.EmbeddingLayer(label)
        return x.sum(1)


def normal_(layer: nn.Conv2d | nn.Linear, gain: float = 1.0) -> None:
    """Normal weights that keep the variance, times `gain`."""
    nn.init.normal_(layer.weight, std=gain / layer.weight[0].numel() ** 0.5)
