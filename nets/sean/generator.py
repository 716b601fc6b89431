"""SEAN's networks: a picture to a style code for each region, and a mask and such codes to a picture."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan.files.errors import UserError
from nets.blocks import SLOPE, conv, conv_doubling, resize_nearest
from nets.sean.ace import ACE
from nets.sean.neighbourhood import Masks


class StyleEncoder(nn.Module):
    """Codes [B, labels, style] of a picture: the mean of its features under each region's mask.

    The layers are those of Zhu et al. 2020 (SEAN), which has `width=32` and `style=512`. `normalise` is its instance
    norm. That removes how bright and how colourful the whole picture is. Photographs show this in many other ways,
    but a narrow encoder of flat drawings learns colours much sooner without it. The norm also cancels the biases
    before it, which the published encoder has. See [Note: biases that a norm cancels].
    """

    def __init__(self, style: int = 512, width: int = 32, normalise: bool = True, gain: float = 0.02) -> None:
        super().__init__()

        def layer(convolution: nn.Conv2d | nn.ConvTranspose2d) -> list[nn.Module]:
            norm = [nn.InstanceNorm2d(convolution.out_channels)] if normalise else []
            return [convolution, *norm, nn.LeakyReLU(SLOPE, inplace=True)]

        up = conv_doubling(4 * width, 8 * width, 3, normed=normalise, gain=gain)
        self.model = nn.Sequential(
            nn.ReflectionPad2d(1),
            *layer(conv(3, width, 3, padding=0, normed=normalise, gain=gain)),
            *layer(conv(width, 2 * width, 3, 2, normed=normalise, gain=gain)),
            *layer(conv(2 * width, 4 * width, 3, 2, normed=normalise, gain=gain)),
            *layer(up),
            nn.ReflectionPad2d(1),
            conv(8 * width, style, 3, padding=0, gain=gain),
            nn.Tanh(),
        )

    def forward(self, image: Tensor, onehot: Tensor) -> Tensor:
        """The codes; a region that is not in the picture gets a code of zeros."""
        features = self.model(image)
        mask = resize_nearest(onehot, features.shape[-2:]).flatten(2)
        pixels = mask.sum(2, keepdim=True).clamp_min(1)
        return torch.bmm(mask, features.flatten(2).transpose(1, 2)) / pixels


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
                f"SeanGenerator: a mask of {width}x{height} cannot be halved {self.upsamplings} times; "
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
