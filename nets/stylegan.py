"""StyleGAN2's networks, small: a mapping network, modulated convolutions and a residual discriminator.

They follow Karras et al. 2019 and 2020, and leave out: noise inputs and style mixing (StyleGAN3 dropped both), and the
truncation trick. Pictures are resized bilinearly; the published networks filter with [1, 3, 3, 1].
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan import ranks
from nets.blocks import SLOPE

GAIN = 2**0.5  # after an activation, to keep the variance


class EqualLinear(nn.Module):
    """A linear layer with equalised learning rate (Karras et al. 2018): unit weights, scaled when they are used.

    `rate` multiplies the optimizer's learning rate for this layer.
    """

    def __init__(self, inside: int, outside: int, rate: float = 1.0, bias: float = 0.0) -> None:
        super().__init__()
        self.rate, self.scale = rate, rate / inside**0.5
        self.weight = nn.Parameter(torch.randn(outside, inside) / rate)
        self.bias = nn.Parameter(torch.full((outside,), bias / rate))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.bias * self.rate)


class EqualConv(nn.Module):
    """A convolution with equalised learning rate that keeps the size."""

    def __init__(self, inside: int, outside: int, kernel: int, bias: bool = True) -> None:
        super().__init__()
        self.scale = 1 / (inside * kernel**2) ** 0.5
        self.weight = nn.Parameter(torch.randn(outside, inside, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outside)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.scale, self.bias, padding=self.weight.shape[-1] // 2)


class ModulatedConv(nn.Module):
    """A convolution whose weights are scaled by each sample's style: Karras et al. 2020, equations 1 to 3.

    It scales inputs and outputs instead, which is the same, and so needs one convolution for the whole batch.
    """

    def __init__(self, style: int, inside: int, outside: int, kernel: int, demodulate: bool = True) -> None:
        super().__init__()
        self.demodulate, self.scale = demodulate, 1 / (inside * kernel**2) ** 0.5
        self.affine = EqualLinear(style, inside, bias=1.0)
        self.weight = nn.Parameter(torch.randn(outside, inside, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outside))

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        """Modulate, convolve, demodulate: outputs have unit variance for any style."""
        scales, weight = self.affine(style), self.weight * self.scale
        y = F.conv2d(x * scales[:, :, None, None], weight, padding=weight.shape[-1] // 2)
        if self.demodulate:
            power = weight.square().sum((2, 3))
            y = y * torch.rsqrt(scales.square() @ power.T + 1e-8)[:, :, None, None]
        return y + self.bias[:, None, None]


class Mapping(nn.Module):
    """From latents to styles: the latent is normalised, then come linear layers that learn slowly."""

    def __init__(self, latent: int, style: int, layers: int) -> None:
        super().__init__()
        sizes = (latent, *[style] * layers)
        self.layers = nn.ModuleList(EqualLinear(*pair, rate=0.01) for pair in pairwise(sizes))

    def forward(self, z: Tensor) -> Tensor:
        """Styles [B, D] of latents [B, latent]."""
        w = z * torch.rsqrt(z.square().mean(1, keepdim=True) + 1e-8)
        for layer in self.layers:
            w = _active(layer(w))
        return w


class Synthesis(nn.Module):
    """From styles to a picture: a learned 4x4 start, two modulated convolutions for each size, the sum of all RGB."""

    def __init__(self, style: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(widths[0], 4, 4))
        self.enlarge = nn.ModuleList(ModulatedConv(style, *pair, 3) for pair in pairwise((widths[0], *widths)))
        self.refine = nn.ModuleList(ModulatedConv(style, width, width, 3) for width in widths[1:])
        self.paint = nn.ModuleList(ModulatedConv(style, width, 3, 1, demodulate=False) for width in widths)
        self.layers = 2 * len(widths)  # with a style of their own; RGB shares the style of the next layer

    def forward(self, styles: Tensor) -> Tensor:
        """Pictures of styles [B, layers, D]. Values have no bounds; the network learns to keep them in -1 to 1."""
        x = self.start.expand(len(styles), -1, -1, -1)
        x = _active(self.enlarge[0](x, styles[:, 0]))
        picture = self.paint[0](x, styles[:, 1])
        larger = zip(self.enlarge[1:], self.refine, self.paint[1:], strict=True)
        for number, (enlarge, refine, paint) in enumerate(larger, start=1):
            x = enlarge(_double(x), styles[:, 2 * number - 1])
            x = refine(_active(x), styles[:, 2 * number])
            x = _active(x)
            picture = _double(picture) + paint(x, styles[:, 2 * number + 1])
        return picture


class StyleGenerator(nn.Module):
    """A picture from a latent vector, by way of styles.

    `widths` are the channels at each size from 4x4 up: four of them make 32 pixels.
    """

    def __init__(
        self, latent: int = 64, style: int = 64, widths: Sequence[int] = (64, 64, 64, 32), mapping: int = 4
    ) -> None:
        super().__init__()
        self.latent = latent
        self.mapping = Mapping(latent, style, mapping)
        self.synthesis = Synthesis(style, widths)

    def forward(self, z: Tensor) -> Tensor:
        return self.styled(z)[0]

    def styled(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Pictures, and the styles [B, layers, D] that they were made of: for a gradient with respect to the styles."""
        styles = self.mapping(z).unsqueeze(1).repeat(1, self.synthesis.layers, 1)
        return self.synthesis(styles), styles


class MinibatchDeviation(nn.Module):
    """One more channel: how much the samples of a group differ (Karras et al. 2018, section 3).

    Sample i of the global batch B is in group i mod (B / group), as in the published code. If `group` does not divide
    B, the next smaller number that does is taken.
    """

    def __init__(self, group: int = 4) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """x [B,C,...] with the channel, which is the last."""
        every, own = ranks.gather(x, own=True)
        size = next(size for size in range(self.group, 0, -1) if len(every) % size == 0)
        variance = every.unflatten(0, (size, -1)).var(0, correction=0)
        spread = (variance + 1e-8).sqrt().flatten(1).mean(1).repeat(size)[own]
        return torch.cat([x, spread.view(-1, *[1] * (x.dim() - 1)).expand_as(x[:, :1])], 1)


class StyleDiscriminator(nn.Module):
    """A score for each picture: residual halvings to 4x4, `MinibatchDeviation`, a convolution and two linear layers."""

    def __init__(self, widths: Sequence[int] = (64, 64, 64, 32), group: int = 4) -> None:
        super().__init__()
        down = list(reversed(widths))
        self.see = EqualConv(3, down[0], 1)
        self.blocks = nn.ModuleList(_DownBlock(*pair) for pair in pairwise(down))
        self.deviation = MinibatchDeviation(group)
        self.look = EqualConv(down[-1] + 1, down[-1], 3)
        self.sum = EqualLinear(16 * down[-1], down[-1])
        self.score = EqualLinear(down[-1], 1)

    def forward(self, image: Tensor) -> Tensor:
        """Scores [B]. They depend on the whole batch."""
        x = _active(self.see(image))
        for block in self.blocks:
            x = block(x)
        x = _active(self.look(self.deviation(x)))
        x = _active(self.sum(x.flatten(1)))
        return self.score(x).squeeze(1)


class _DownBlock(nn.Module):
    """Two convolutions and a halving, plus a halved 1x1; the sum is scaled to the variance of its parts."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = EqualConv(inside, inside, 3)
        self.second = EqualConv(inside, outside, 3)
        self.shortcut = EqualConv(inside, outside, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = _active(self.first(x))
        y = F.avg_pool2d(_active(self.second(y)), 2)
        return (y + self.shortcut(F.avg_pool2d(x, 2))) * 0.5**0.5


def _active(x: Tensor) -> Tensor:
    return F.leaky_relu(x, SLOPE) * GAIN


def _double(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
