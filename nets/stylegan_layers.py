"""What StyleGAN2's networks are made of, as published (Karras et al. 2020), with the names of the published weights."""

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan import noise, ranks
from gan.files.errors import UserError
from nets.blocks import SLOPE, convolve, filtered, in_one_pass, taps

GAIN = 2**0.5  # after an activation, to keep the variance
AVERAGE = 0.995  # decay of the average style
Grain = Literal["random", "const", "none"]


class Dense(nn.Module):
    """A linear layer with equalised learning rate (Karras et al. 2018): unit weights, scaled when they are used.

    `rate` multiplies the optimizer's learning rate for this layer.
    """

    def __init__(
        self, inside: int, outside: int, *, rate: float = 1.0, bias: float = 0.0, active: bool = False
    ) -> None:
        super().__init__()
        self.rate, self.scale, self.active = rate, rate / inside**0.5, active
        self.weight = nn.Parameter(torch.randn(outside, inside) / rate)
        self.bias = nn.Parameter(torch.full((outside,), bias))

    def forward(self, x: Tensor) -> Tensor:
        gain = GAIN if self.active else 1.0  # leaky_relu(g x) = g leaky_relu(x), and weights are scaled anyway
        bias = self.bias if self.rate * gain == 1 else self.bias * (self.rate * gain)
        x = F.linear(x, self.weight * (self.scale * gain), bias)
        return F.leaky_relu(x, SLOPE) if self.active else x


class Filtered(nn.Module):
    """Has the filter as published weights do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("resample_filter", taps())


class Conv(Filtered):
    """A convolution with equalised learning rate that keeps the size, or halves it."""

    def __init__(
        self, inside: int, outside: int, kernel: int, *, halve: bool = False, bias: bool = True, clamp: float | None
    ) -> None:
        super().__init__()
        self.scale, self.halve, self.clamp = 1 / (inside * kernel**2) ** 0.5, halve, clamp
        self.weight = nn.Parameter(torch.randn(outside, inside, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outside)) if bias else None

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        """Without a bias there is no activation either."""
        padding, stride = self.weight.shape[-1] // 2, 1
        if self.halve:
            # Only a 1x1 kernel can have its picture halved before.
            stride = 2 if padding else 1
            x, padding = filtered(x, 1 + padding, 3 - stride), 0
        if self.bias is None:
            return convolve(x, (self.weight * (self.scale * gain)).to(x.dtype), stride=stride, padding=padding)
        gain *= GAIN
        weight, bias = (self.weight * (self.scale * gain)).to(x.dtype), (self.bias * gain).to(x.dtype)
        return _active(convolve(x, weight, bias, stride=stride, padding=padding), self.clamp, gain / GAIN)


class Mapping(nn.Module):
    """From latents and labels to styles: both are normalised, then come linear layers that learn slowly.

    Without a `latent` the labels alone are mapped, and no average of the styles is kept.
    """

    w_avg: Tensor

    def __init__(self, latent: int, classes: int, width: int, layers: int) -> None:
        super().__init__()
        self.latent, self.classes, self.layers = latent, classes, layers
        if classes:
            self.embed = Dense(classes, width)
        sizes = (latent + (width if classes else 0), *[width] * layers)
        for number, pair in enumerate(pairwise(sizes)):
            self.add_module(f"fc{number}", Dense(*pair, rate=0.01, active=True))
        if latent:
            self.register_buffer("w_avg", torch.zeros(width))

    def forward(self, z: Tensor | None, label: Tensor | None = None, follow: bool = True) -> Tensor:
        """Styles [B, width]. In training the average follows those of the global batch, if it is to."""
        parts = [] if z is None else [_normal(z)]
        if self.classes:
            if label is None:
                raise UserError(f"the network knows {self.classes} classes; give it a label for each picture")
            parts.append(_normal(self.embed(label)))
        w = torch.cat(parts, 1)
        for number in range(self.layers):
            w = getattr(self, f"fc{number}")(w)
        if self.latent and self.training and follow:
            with torch.no_grad():
                self.w_avg.copy_(ranks.mean(w.detach().mean(0)).lerp(self.w_avg, AVERAGE))
        return w


class ModulatedConv(Filtered):
    """A 3x3 convolution whose weights are scaled by each sample's style: Karras et al. 2020, equations 1 to 3.

    It scales inputs and outputs instead, which is the same, and so needs one convolution for the whole batch.
    """

    noise_const: Tensor

    def __init__(self, inside: int, outside: int, style: int, side: int, *, up: bool, clamp: float | None) -> None:
        super().__init__()
        self.side, self.up, self.clamp = side, up, clamp
        self.weight = nn.Parameter(torch.randn(outside, inside, 3, 3))
        self.noise_strength = nn.Parameter(torch.zeros(()))
        self.bias = nn.Parameter(torch.zeros(outside))
        self.register_buffer("noise_const", torch.randn(side, side))
        self.affine = Dense(style, inside, bias=1.0)

    def forward(self, x: Tensor, style: Tensor, grain: Grain) -> Tensor:
        """Modulate, convolve, demodulate: outputs have unit variance for any style."""
        scales = self.affine(style)
        power = scales.square() @ self.weight.square().sum((2, 3)).T
        weight = self.weight.to(x.dtype)
        x = x * scales.to(x.dtype)[:, :, None, None]
        if self.up:
            # A transposed convolution turns its kernel by 180 degrees. The published one does so here too.
            x = filtered(convolve(x, 4 * weight.transpose(0, 1), stride=2, transposed=True), 1)
        else:
            x = convolve(x, weight, padding=1)
        # leaky_relu(g x) = g leaky_relu(x)
        demodulate = (GAIN * torch.rsqrt(power + 1e-8)).to(x.dtype)[:, :, None, None]
        x = torch.addcmul((GAIN * self.bias).to(x.dtype)[:, None, None], x, demodulate)
        if grain != "none":
            size = style.shape[0], 1, self.side, self.side
            drawn = self.noise_const if grain == "const" else noise.randn(size, like=style)
            x = x.add_((GAIN * self.noise_strength * drawn).to(x.dtype))
        return _active(x, self.clamp)


class ToRgb(nn.Module):
    """The picture of a resolution: a modulated 1x1, by weights of each sample's own, for there are so few."""

    def __init__(self, inside: int, channels: int, style: int, clamp: float | None) -> None:
        super().__init__()
        self.scale, self.clamp = 1 / inside**0.5, clamp
        self.weight = nn.Parameter(torch.randn(channels, inside, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.affine = Dense(style, inside, bias=1.0)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        weight = self.weight.flatten(1) * (self.affine(style) * self.scale)[:, None]
        picture = weight.to(x.dtype) @ x.flatten(2) + self.bias.to(x.dtype)[:, None]
        return _clamped(picture, self.clamp).unflatten(2, x.shape[2:])


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


def _normal(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-8)


def _active(x: Tensor, limit: float | None, gain: float = 1.0) -> Tensor:
    """A leaky ReLU and a clamp, in place."""
    if in_one_pass(x):
        from nets import fused

        return fused.activated(x, None if limit is None else limit * gain)
    return _clamped(F.leaky_relu(x, SLOPE, inplace=True), limit, gain)


def _clamped(x: Tensor, limit: float | None, gain: float = 1.0) -> Tensor:
    return x if limit is None else x.clamp(-limit * gain, limit * gain)
