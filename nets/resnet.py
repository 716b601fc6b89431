"""The ResNet generator of CycleGAN, pix2pix and CUT: down twice, some residual blocks, up twice.

The names of modules and parameters are the published ones, so a published state dict fits.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan.files.errors import UserError
from nets.blocks import Dropout, conv, conv_doubling, start_
from nets.norm import SyncBatchNorm

Norm = Literal["instance", "batch"]
SMALLEST = 8  # pixels of a side


class ResnetGenerator(nn.Module):
    """The generator of Zhu et al. 2017 (CycleGAN), after Johnson et al. 2016, from pictures to pictures.

    The published one has `width=64`, and 9 `blocks` at 256 pixels or 6 at 128. With `dropout` a residual block drops
    half of its values, also in evaluation, as pix2pix does. With `smooth` the sizes change by blurring filters, as in
    CUT.
    """

    def __init__(
        self,
        inside: int = 3,
        outside: int = 3,
        width: int = 64,
        blocks: int = 9,
        *,
        norm: Norm = "instance",
        dropout: bool = False,
        smooth: bool = False,
    ) -> None:
        super().__init__()
        self.inside = inside
        # A bias before a batch norm is left out; before an instance norm the published networks have one.
        make, make_doubling = (partial(kind, bias=norm == "instance", normed=True) for kind in (conv, conv_doubling))

        def normed(layer: nn.Conv2d | nn.ConvTranspose2d) -> list[nn.Module]:
            return [layer, normalisation(layer.out_channels, norm), nn.ReLU(inplace=True)]

        def down(channels: int) -> list[nn.Module]:
            if smooth:  # CUT's losses see what these convolutions make, so their biases count
                layer = conv(channels, 2 * channels, 3, bias=norm == "instance")
                return [*normed(layer), BlurDown(2 * channels)]
            return normed(make(channels, 2 * channels, 3, 2))

        def up(channels: int) -> list[nn.Module]:
            if smooth:
                return [BlurUp(channels), *normed(make(channels, channels // 2, 3))]
            return normed(make_doubling(channels, channels // 2, 3))

        self.model = nn.Sequential(
            nn.ReflectionPad2d(3),
            *normed(make(inside, width, 7, padding=0)),
            *down(width),
            *down(2 * width),
            *(ResnetBlock(4 * width, norm, dropout) for _ in range(blocks)),
            *up(4 * width),
            *up(2 * width),
            nn.ReflectionPad2d(3),
            conv(width, outside, 7, padding=0),
            nn.Tanh(),
        )
        start_(self)

    def forward(self, x: Tensor) -> Tensor:
        """A picture from -1 to 1, of the input's size."""
        return self.encoded(x, ())[0]

    def encoded(self, x: Tensor, layers: Sequence[int], *, paint: bool = True) -> tuple[Tensor, list[Tensor]]:
        """The picture, and the outputs of the layers of these numbers. Without `paint` it stops at the last of them."""
        size = x.shape[-2:]
        if min(size) < SMALLEST:
            raise UserError(f"a picture of {size[0]} x {size[1]} is too small; take {SMALLEST} x {SMALLEST} or more")
        missing = [-side % 4 for side in size]
        if any(missing):
            x = F.pad(x, (0, missing[1], 0, missing[0]), "reflect")
        found = []
        for number, layer in enumerate(self.model):
            x = layer(x)
            if number in layers:
                found.append(x)
            if not paint and number == max(layers):
                return x, found
        return (x[..., : size[0], : size[1]] if any(missing) else x), found


class ResnetBlock(nn.Module):
    """Two convolutions beside a shortcut. There is no ReLU before the sum."""

    def __init__(self, channels: int, norm: Norm, dropout: bool) -> None:
        super().__init__()

        def layers() -> list[nn.Module]:
            layer = conv(channels, channels, 3, padding=0, bias=norm == "instance", normed=True)
            return [nn.ReflectionPad2d(1), layer, normalisation(channels, norm)]

        between = [nn.ReLU(inplace=True), *([Dropout()] if dropout else [])]
        self.conv_block = nn.Sequential(*layers(), *between, *layers())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv_block(x)


class BlurDown(nn.Module):
    """Halves a picture with a smooth filter (Zhang 2019)."""

    filt: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("filt", _filter(channels, 1.0, 2.0, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (1, 1, 1, 1), "reflect"), self.filt, stride=2, groups=x.shape[1])


class BlurUp(nn.Module):
    """Doubles a picture with a smooth filter (Zhang 2019)."""

    filt: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("filt", 4 * _filter(channels, 1.0, 3.0, 3.0, 1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (1, 1, 1, 1), "replicate")
        return F.conv_transpose2d(x, self.filt, stride=2, padding=2, groups=x.shape[1])[:, :, 1:-1, 1:-1]


def _filter(channels: int, *taps: float) -> Tensor:
    """The square of these taps, of sum 1, for each channel."""
    line = torch.tensor(taps) / sum(taps)
    return (line[:, None] * line).repeat(channels, 1, 1, 1)


def normalisation(channels: int, norm: Norm) -> nn.Module:
    return SyncBatchNorm(channels) if norm == "batch" else nn.InstanceNorm2d(channels)
