"""pix2pix's generator: an encoder and a decoder with a shortcut at every size.

The names of modules and parameters are the published ones, so a published state dict fits.
"""

import torch
from torch import Tensor, nn

from gan.files.errors import UserError
from nets.blocks import SLOPE, Dropout, conv, conv_doubling, start_
from nets.resnet import Norm, normalisation


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
        bias = norm == "instance"
        down: list[nn.Module] = [nn.LeakyReLU(SLOPE)]
        if block is None:  # the innermost: there may be one pixel, which no norm could take
            down += [conv(outer, inner, 4, 2, 1, bias=bias), nn.ReLU(inplace=True)]
        else:
            down += [conv(outer, inner, 4, 2, 1, bias=bias, normed=True), normalisation(inner, norm)]
            down += [block, nn.ReLU(inplace=True)]
        up = conv_doubling(inner if block is None else 2 * inner, outer, 4, bias=bias, normed=True)
        self.model = nn.Sequential(*down, up, normalisation(outer, norm), *([Dropout()] if drops else []))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.model(x)], 1)
