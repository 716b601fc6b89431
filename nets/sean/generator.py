"""SEAN's generator: from a mask and a style code for each region to a picture."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan.files.errors import UserError
from nets.blocks import SLOPE, conv
from nets.sean.ace import ACE
from nets.sean.neighbourhood import Masks


class Block(nn.Module):
    """A residual block whose normalisations see mask and styles.

    conv_0 and conv_1 have a bias because the published ones do. A later batch norm cancels it, also by way of the
    shortcuts; only after the `last` block there is no more norm. See [Note: biases that a norm cancels].
    """

    def __init__(self, inside: int, outside: int, ace: Callable[[int], ACE], gain: float, last: bool) -> None:
        super().__init__()
        middle = min(inside, outside)
        self.ace_0 = ace(inside)
        self.conv_0 = conv(inside, middle, 3, spectral=True, normed=True, gain=gain)
        self.ace_1 = ace(middle)
        self.conv_1 = conv(middle, outside, 3, spectral=True, normed=not last, gain=gain)
        self.learned_shortcut = inside != outside
        if self.learned_shortcut:
            self.ace_s = ace(inside)
            self.conv_s = conv(inside, outside, 1, spectral=True, bias=False, gain=gain)

    def forward(self, x: Tensor, masks: Masks, codes: Tensor | None) -> Tensor:
        """shortcut(x) + conv_1(act(ACE_1(conv_0(act(ACE_0(x))))))."""
        sized = masks.at((x.shape[-2], x.shape[-1]))
        shortcut = self.ace_s(x, sized, codes, then=self.conv_s) if self.learned_shortcut else x
        inner = self.ace_0(x, sized, codes, then=self.conv_0, slope=SLOPE)
        return shortcut + self.ace_1(inner, sized, codes, then=self.conv_1, slope=SLOPE)


class SeanGenerator(nn.Module):
    """The generator of Zhu et al. 2020 (SEAN), in any size.

    It starts from the mask at size / 2**upsamplings and doubles it `upsamplings` times; the published ones are 5 and
    6. `width` is the number of channels of the last block (64). Each block before it has twice those of the next, up
    to 16 times `width`. `hidden` is the width of the mask branch (128), and `style` the length of a code (512). The
    last block sees no styles. With `style=None` no block does: that is SPADE (Park et al. 2019) with SEAN's noise.
    With `edges`, masks have one more plane than labels, for the edges of instances. `recompute` keeps less for
    backward and computes it again. The modules have their published names.
    """

    def __init__(
        self,
        labels: int = 19,
        style: int | None = 512,
        width: int = 64,
        hidden: int = 128,
        upsamplings: int = 5,
        gain: float = 0.02,
        edges: bool = False,
        recompute: bool = True,
    ) -> None:
        super().__init__()
        if not 2 <= upsamplings <= 6:
            raise UserError(f"SeanGenerator: upsamplings={upsamplings} is not in 2 to 6; try 5")
        self.labels, self.upsamplings = labels, upsamplings
        planes = labels + edges
        shrinking = min(upsamplings, 5) - 1
        wide = width * 2**shrinking

        def block(inside: int, outside: int, last: bool = False) -> Block:
            seen = None if last else style
            ace = partial(ACE, labels=labels, planes=planes, hidden=hidden, style=seen, gain=gain, recompute=recompute)
            return Block(inside, outside, ace, gain, last)

        # The mask at its smallest, the three widest blocks, then one block for each halving of the width.
        self.fc = conv(planes, wide, 3, normed=True, gain=gain)
        self.head_0 = block(wide, wide)
        self.G_middle_0, self.G_middle_1 = block(wide, wide), block(wide, wide)
        self.ups = tuple(f"up_{number}" for number in range(shrinking))
        for number, name in enumerate(self.ups):
            inside = wide // 2**number
            self.add_module(name, block(inside, inside // 2, last=name == self.ups[-1]))
        self.conv_img = conv(width, 3, 3, gain=gain)

    def forward(self, onehot: Tensor, codes: Tensor | None = None) -> Tensor:
        """A picture [B,3,H,W] in -1 to 1 for masks [B,labels,H,W] and codes [B,labels,style]."""
        height, width = onehot.shape[-2:]
        shrink = 2**self.upsamplings
        if height % shrink or width % shrink:
            raise UserError(
                f"SeanGenerator: a mask of {height} x {width} cannot be halved {self.upsamplings} times; "
                f"choose a size divisible by {shrink}, e.g. {-(-height // shrink) * shrink}, or fewer upsamplings"
            )
        masks = Masks(onehot, self.labels)
        x = self.fc(masks.at((height // shrink, width // shrink)).planes)
        x = self.head_0(x, masks, codes)
        x = self.G_middle_0(double(x), masks, codes)
        x = double(x) if self.upsamplings == 6 else x
        x = self.G_middle_1(x, masks, codes)
        for up in self.ups:
            x = self.get_submodule(up)(double(x), masks, codes)
        return torch.tanh(self.conv_img(F.leaky_relu(x, SLOPE)))


def double(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="nearest")
