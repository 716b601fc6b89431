"""SEAN's generator: a mask and a style code a region in, a picture out."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan import noise
from gan.errors import UserError
from nets.blocks import SLOPE, conv, resize_nearest, xavier_
from nets.norm import SyncBatchNorm


class ACE(nn.Module):
    """Region-adaptive normalisation: noise, a batch norm without weights, and a scale and shift for every pixel.

    The scale and shift blend two branches: the mask's (SPADE, Park et al. 2019) and the styles' (SEAN, Zhu et al.
    2020), the latter only where `style` is given. Nothing loops over pictures or labels. In every stack of scale
    and shift the scale's channels come first.

    [Note: folding the style branch]
    The style branch convolves a map that is constant within a region, so the convolution is a function of the
    one-hot mask alone: applied to the codes first, its kernel becomes one of `labels` input channels, of each
    picture's own. The result is the same, border included: both are padded with zeros.

        codes [B,labels,S] * kernel [2C,S,3,3]  ->  kernels [B,2C,labels,3,3];  kernels * mask -> [B,2C,H,W]
    """

    def __init__(self, channels: int, labels: int, hidden: int, style: int | None, gain: float) -> None:
        super().__init__()
        self.noise_scale = nn.Parameter(torch.zeros(channels, 1, 1))
        self.norm = SyncBatchNorm(channels, affine=False)
        self.mask_features = conv(labels, hidden, 3, gain=gain)
        self.mask_affine = scale_and_shift(hidden, channels, gain)
        if style is None:
            self.style_affine = None
            return
        self.region_weight = nn.Parameter(torch.empty(labels, style, style))
        self.region_bias = nn.Parameter(torch.zeros(labels, 1, style))
        for weight in self.region_weight.detach():
            xavier_(weight, gain)
        self.style_affine = scale_and_shift(style, channels, gain)
        self.blend = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, onehot: Tensor, codes: Tensor) -> Tensor:
        """Normalise x [B,C,H,W] by the one-hot mask of its own size and the codes [B,labels,S]."""
        grain = noise.randn((len(x), 1, *x.shape[2:]), like=x)
        scale, shift = self.affine(onehot, codes).chunk(2, 1)
        return self.norm(x + grain * self.noise_scale) * (1 + scale) + shift

    def affine(self, onehot: Tensor, codes: Tensor) -> Tensor:
        """Scale and shift of every pixel, stacked: [B,2C,H,W]."""
        mask = self.mask_affine(F.relu(self.mask_features(onehot)))
        if self.style_affine is None:
            return mask
        share = torch.sigmoid(self.blend).repeat_interleave(mask.shape[1] // 2).view(1, -1, 1, 1)
        return share * self.style(onehot, codes) + (1 - share) * mask

    def style(self, onehot: Tensor, codes: Tensor) -> Tensor:
        """The style branch. See [Note: folding the style branch]."""
        codes = F.relu(torch.baddbmm(self.region_bias, codes.transpose(0, 1), self.region_weight))
        kernels = torch.einsum("lbs,osij->bolij", codes, self.style_affine.weight)
        pictures, labels, *size = onehot.shape
        spread = F.conv2d(
            onehot.reshape(1, pictures * labels, *size), kernels.flatten(0, 1), padding=1, groups=pictures
        )
        return spread.view(pictures, -1, *size) + self.style_affine.bias.view(1, -1, 1, 1)


class Block(nn.Module):
    """A residual block whose normalisations see mask and styles.

    conv_0 and conv_1 have a bias because the published ones do. A batch norm cancels it, also where it arrives by
    way of shortcuts; only the `last` block's output meets none any more. See [Note: biases that a norm cancels].
    """

    def __init__(
        self, inside: int, outside: int, labels: int, hidden: int, style: int | None, gain: float, last: bool
    ) -> None:
        super().__init__()
        middle = min(inside, outside)
        self.ace_0 = ACE(inside, labels, hidden, style, gain)
        self.conv_0 = conv(inside, middle, 3, spectral=True, normed=True, gain=gain)
        self.ace_1 = ACE(middle, labels, hidden, style, gain)
        self.conv_1 = conv(middle, outside, 3, spectral=True, normed=not last, gain=gain)
        self.learned_shortcut = inside != outside
        if self.learned_shortcut:
            self.ace_s = ACE(inside, labels, hidden, style, gain)
            self.conv_s = conv(inside, outside, 1, spectral=True, bias=False, gain=gain)

    def forward(self, x: Tensor, onehot: Tensor, codes: Tensor) -> Tensor:
        """shortcut(x) + conv_1(act(ACE_1(conv_0(act(ACE_0(x))))))."""
        onehot = resize_nearest(onehot, x.shape[-2:])
        shortcut = self.conv_s(self.ace_s(x, onehot, codes)) if self.learned_shortcut else x
        inner = self.conv_0(F.leaky_relu(self.ace_0(x, onehot, codes), SLOPE))
        return shortcut + self.conv_1(F.leaky_relu(self.ace_1(inner, onehot, codes), SLOPE))


class SeanGenerator(nn.Module):
    """The generator of Zhu et al. 2020 (SEAN), in any size.

    `upsamplings` is how often the start, the mask at size / 2**upsamplings, is doubled: published are 5 and 6.
    `width` is the last block's channels (64); each block before it has twice those of the next, 16 times at most.
    `hidden` are the mask branch's channels (128), `style` the length of a code (512). The last block sees no styles.
    """

    def __init__(
        self,
        labels: int = 19,
        style: int = 512,
        width: int = 64,
        hidden: int = 128,
        upsamplings: int = 5,
        gain: float = 0.02,
    ) -> None:
        super().__init__()
        if not 2 <= upsamplings <= 6:
            raise UserError(f"SeanGenerator: upsamplings={upsamplings} is not in 2 to 6; try 5")
        self.upsamplings = upsamplings
        shrinking = min(upsamplings, 5) - 1
        wide = width * 2**shrinking

        def block(inside: int, outside: int, last: bool = False) -> Block:
            return Block(inside, outside, labels, hidden, None if last else style, gain, last)

        # The mask at its smallest, the three widest blocks, then one block a halving of the width.
        self.start = conv(labels, wide, 3, normed=True, gain=gain)
        self.head = block(wide, wide)
        self.middle_0, self.middle_1 = block(wide, wide), block(wide, wide)
        widths = [wide // 2**k for k in range(shrinking + 1)]
        self.ups = nn.ModuleList(block(inside, outside, last=outside == width) for inside, outside in pairwise(widths))
        self.paint = conv(width, 3, 3, gain=gain)

    def forward(self, onehot: Tensor, codes: Tensor) -> Tensor:
        """A picture [B,3,H,W] in -1 to 1 for masks [B,labels,H,W] and codes [B,labels,style]."""
        height, width = onehot.shape[-2:]
        shrink = 2**self.upsamplings
        if height % shrink or width % shrink:
            raise UserError(
                f"SeanGenerator: a mask of {height} x {width} cannot be halved {self.upsamplings} times; "
                f"choose a size divisible by {shrink}, e.g. {-(-height // shrink) * shrink}, or fewer upsamplings"
            )
        x = self.start(resize_nearest(onehot, (height // shrink, width // shrink)))
        x = self.head(x, onehot, codes)
        x = self.middle_0(double(x), onehot, codes)
        x = double(x) if self.upsamplings == 6 else x
        x = self.middle_1(x, onehot, codes)
        for up in self.ups:
            x = up(double(x), onehot, codes)
        return torch.tanh(self.paint(F.leaky_relu(x, SLOPE)))


def scale_and_shift(inside: int, channels: int, gain: float) -> nn.Conv2d:
    """Two convolutions 3x3 in one, the scale's and the shift's, each with the starting values it has alone."""
    layer = conv(inside, 2 * channels, 3)
    for half in layer.weight.detach().chunk(2):
        xavier_(half, gain)
    return layer


def double(x: Tensor) -> Tensor:
    """Twice the size, every pixel four times."""
    return F.interpolate(x, scale_factor=2, mode="nearest")
