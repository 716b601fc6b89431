"""The generators of pix2pix, CycleGAN and CUT: a ResNet, and an encoder and decoder with a shortcut at every size.

The names of modules and parameters are the published ones, so a published state dict fits.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan.files.errors import UserError
from nets.blocks import SLOPE, Dropout, conv, conv_doubling, start_
from nets.norm import ActNorm, SyncBatchNorm

Norm = Literal["instance", "batch", "act"]
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

        def layer(*sizes: int, **how: Any) -> list[nn.Module]:
            return [*normed(norm, *sizes, **how), nn.ReLU(inplace=True)]

        def down(channels: int) -> list[nn.Module]:
            if smooth:  # CUT's losses see what these convolutions make, so their biases count
                return [*layer(channels, 2 * channels, 3, normed=False), Blur(2 * channels)]
            return layer(channels, 2 * channels, 3, 2)

        def up(channels: int) -> list[nn.Module]:
            if smooth:
                return [Blur(channels, up=True), *layer(channels, channels // 2, 3)]
            return layer(channels, channels // 2, 3, make=conv_doubling)

        self.model = nn.Sequential(
            nn.ReflectionPad2d(3),
            *layer(inside, width, 7, padding=0),
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
            return [nn.ReflectionPad2d(1), *normed(norm, channels, channels, 3, padding=0)]

        between = [nn.ReLU(inplace=True), *([Dropout()] if dropout else [])]
        self.conv_block = nn.Sequential(*layers(), *between, *layers())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv_block(x)


class UNet(nn.Module):
    """The U-Net of Isola et al. 2017: halve the picture `depth` times, double it again, and join equal sizes.

    The channels double from `width` to 8 times `width` at most. The published unet_256 has a `depth` of 8, and unet_128
    of 7. The innermost steps up but the first have dropout, `dropouts` of them, in evaluation too: it is the only
    source of variety. Published are depth - 5.
    """

    def __init__(
        self,
        inside: int,
        outside: int,
        width: int = 64,
        depth: int = 8,
        dropouts: int | None = None,
        norm: Norm = "batch",
    ) -> None:
        super().__init__()
        if depth < 2:
            raise UserError(f"UNet: depth={depth} leaves nothing to join; try 2 or more")
        self.depth, self.inside = depth, inside
        dropouts = max(0, depth - 5) if dropouts is None else dropouts
        widths = [width * min(2**k, 8) for k in range(depth)]
        block: UNetBlock | None = None
        for k in reversed(range(1, depth)):
            drops = depth - 1 - dropouts <= k < depth - 1
            block = UNetBlock(widths[k - 1], widths[k], block, norm, drops)
        assert block is not None
        down = conv(inside, width, 4, 2, 1, bias=norm == "instance")
        up = conv_doubling(2 * width, outside, 4)
        outermost = nn.Sequential(down, block, nn.ReLU(inplace=True), up, nn.Tanh())
        self.model = nn.ModuleDict({"model": outermost})  # published names have the word twice
        start_(self)

    def forward(self, x: Tensor) -> Tensor:
        """A picture from -1 to 1, of the input's size, whose sides 2**depth divides."""
        return self.model["model"](x)


class UNetBlock(nn.Module):
    """Halves the features, lets an inner block change them, doubles them again, and joins them to what came in."""

    def __init__(self, outer: int, inner: int, block: "UNetBlock | None", norm: Norm, drops: bool) -> None:
        super().__init__()
        if block is None:  # the innermost: there may be one pixel, which no norm could take
            down: list[nn.Module] = [conv(outer, inner, 4, 2, 1, bias=norm == "instance")]
        else:
            down = [*normed(norm, outer, inner, 4, 2, 1), block]
        up = normed(norm, inner if block is None else 2 * inner, outer, 4, make=conv_doubling)
        last = [Dropout()] if drops else []
        self.model = nn.Sequential(nn.LeakyReLU(SLOPE), *down, nn.ReLU(inplace=True), *up, *last)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.model(x)], 1)


class Blur(nn.Module):
    """Halves a picture with a smooth filter, or doubles it (Zhang 2019)."""

    filt: Tensor

    def __init__(self, channels: int, up: bool = False) -> None:
        super().__init__()
        self.up = up
        taps = torch.tensor((1.0, 3.0, 3.0, 1.0) if up else (1.0, 2.0, 1.0))
        line = taps / taps.sum()
        self.register_buffer("filt", (4 if up else 1) * (line[:, None] * line).repeat(channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if not self.up:
            return F.conv2d(F.pad(x, (1, 1, 1, 1), "reflect"), self.filt, stride=2, groups=x.shape[1])
        x = F.pad(x, (1, 1, 1, 1), "replicate")
        return F.conv_transpose2d(x, self.filt, stride=2, padding=2, groups=x.shape[1])[:, :, 1:-1, 1:-1]


def normed(norm: Norm, *sizes: int, make: Callable[..., Any] = conv, **how: Any) -> list[nn.Module]:
    """A convolution and its norm. Before a batch norm it has no bias; before others the published networks have one."""
    layer = make(*sizes, **{"bias": norm != "batch", "normed": norm != "act"} | how)
    kinds = {"batch": SyncBatchNorm, "instance": nn.InstanceNorm2d, "act": ActNorm}
    return [layer, kinds[norm](layer.out_channels)]
