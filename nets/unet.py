"""pix2pix's generator: an encoder and a decoder with a shortcut at every size."""

import torch
from torch import Tensor, nn

from gan.files.errors import UserError
from nets.blocks import SLOPE, Dropout, conv, conv_doubling
from nets.norm import SyncBatchNorm


class UNet(nn.Module):
    """The U-Net of Isola et al. 2017: halve the picture `depth` times, double it again, and join equal sizes.

    The channels double from `width` to 8 times `width` at most. All layers but those at the ends have batch norm. The
    innermost `dropouts` steps up have dropout, in evaluation too: it is the only source of variety.
    """

    def __init__(
        self, inside: int, outside: int, width: int = 64, depth: int = 8, dropouts: int = 3, gain: float = 0.02
    ) -> None:
        super().__init__()
        if depth < 2:
            raise UserError(f"UNet: depth={depth} leaves nothing to join; try 2 or more")
        self.depth = depth
        widths = [width * min(2**k, 8) for k in range(depth)]

        # Down: the first layer reads the picture itself and the last has too few pixels, so neither has a norm.
        self.down = nn.ModuleList([conv(inside, width, 4, 2, 1, gain=gain)])
        for k in range(1, depth):
            last = k == depth - 1
            layer = conv(widths[k - 1], widths[k], 4, 2, 1, bias=last, gain=gain)
            self.down.append(
                nn.Sequential(nn.LeakyReLU(SLOPE), layer, nn.Identity() if last else SyncBatchNorm(widths[k]))
            )

        # Up: each step gets the output of the step before, and the features of the way down at that size.
        self.up = nn.ModuleList()
        for k in reversed(range(1, depth)):
            joined = widths[k] * (1 if k == depth - 1 else 2)
            layer = conv_doubling(joined, widths[k - 1], 4, bias=False, gain=gain)
            dropout = [Dropout()] if depth - k <= dropouts else []
            self.up.append(nn.Sequential(nn.ReLU(), layer, SyncBatchNorm(widths[k - 1]), *dropout))
        self.paint = nn.Sequential(nn.ReLU(), conv_doubling(2 * width, outside, 4, gain=gain), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        """A picture from -1 to 1, of the input's size."""
        if any(side % 2**self.depth for side in x.shape[-2:]):
            height, width = x.shape[-2:]
            raise UserError(
                f"UNet: {height} x {width} cannot be halved {self.depth} times; "
                f"choose a size divisible by {2**self.depth}, or a smaller depth"
            )
        seen = []
        for down in self.down:
            x = down(x)
            seen.append(x)
        for up, shortcut in zip(self.up, reversed(seen[:-1]), strict=True):
            x = torch.cat([up(x), shortcut], 1)
        return self.paint(x)
