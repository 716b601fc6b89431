"""StyleGAN2's networks as published (Karras et al. 2020), with the names of the published weights, in plain torch.

Sizes that are no power of two, or not square, are the middle of the next power of two.
"""

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan import noise, ranks
from gan.files.errors import UserError
from nets.blocks import SLOPE

GAIN = 2**0.5  # after an activation, to keep the variance
MANY = 256  # channels
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
        if self.active:  # leaky_relu(g x) = g leaky_relu(x), and g costs nothing where the weights are scaled anyway
            x = F.linear(x, self.weight * (self.scale * GAIN), self.bias * (self.rate * GAIN))
            return F.leaky_relu(x, SLOPE)
        return F.linear(x, self.weight * self.scale, self.bias * self.rate)


class Filtered(nn.Module):
    """What has the published low-pass filter [1, 3, 3, 1], in both directions."""

    resample_filter: Tensor

    def _add_filter(self) -> None:
        taps = torch.tensor([1.0, 3.0, 3.0, 1.0])
        self.register_buffer("resample_filter", torch.outer(taps, taps) / 64)

    def filtered(self, x: Tensor, padding: int, stride: int = 1, gain: float = 1.0) -> Tensor:
        """Each channel by itself."""
        return F.conv2d(x, self._of_each(x, gain), padding=padding, stride=stride, groups=x.shape[1])

    def doubled(self, x: Tensor) -> Tensor:
        """Twice the size: zeros in between, and then the filter."""
        return F.conv_transpose2d(x, self._of_each(x, 4.0), padding=1, stride=2, groups=x.shape[1])

    def _of_each(self, x: Tensor, gain: float) -> Tensor:
        return (gain * self.resample_filter).to(x.dtype).expand(x.shape[1], 1, -1, -1)


class Conv(Filtered):
    """A convolution with equalised learning rate that keeps the size, or halves it."""

    def __init__(
        self, inside: int, outside: int, kernel: int, *, halve: bool = False, bias: bool = True, clamp: float | None
    ) -> None:
        super().__init__()
        self.scale, self.halve, self.clamp = 1 / (inside * kernel**2) ** 0.5, halve, clamp
        self.weight = nn.Parameter(torch.randn(outside, inside, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(outside)) if bias else None
        self._add_filter()

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        """Without a bias there is no activation either."""
        padding, stride = self.weight.shape[-1] // 2, 1
        if self.halve:
            # Only a 1x1 kernel can have its picture halved before.
            stride = 2 if padding else 1
            x, padding = self.filtered(x, 1 + padding, 3 - stride), 0
        if self.bias is None:
            return F.conv2d(x, (self.weight * (self.scale * gain)).to(x.dtype), stride=stride, padding=padding)
        gain *= GAIN
        weight, bias = (self.weight * (self.scale * gain)).to(x.dtype), (self.bias * gain).to(x.dtype)
        x = F.leaky_relu(F.conv2d(x, weight, bias, stride, padding), SLOPE, inplace=True)
        return _clamped(x, self.clamp, gain / GAIN)


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
        self._add_filter()
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
            x = self.filtered(F.conv_transpose2d(x, weight.transpose(0, 1), stride=2), 1, gain=4.0)
        else:
            x = F.conv2d(x, weight, padding=1)
        # leaky_relu(g x) = g leaky_relu(x)
        demodulate = (GAIN * torch.rsqrt(power + 1e-8)).to(x.dtype)[:, :, None, None]
        x = torch.addcmul((GAIN * self.bias).to(x.dtype)[:, None, None], x, demodulate)
        if grain != "none":
            x = x.add_((GAIN * self.noise_strength * self._grain(grain, style)).to(x.dtype))
        return _clamped(F.leaky_relu(x, SLOPE, inplace=True), self.clamp)

    def _grain(self, kind: Grain, style: Tensor) -> Tensor:
        if kind == "const":
            return self.noise_const
        return noise.randn((len(style), 1, self.side, self.side), like=style)


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


class SynthesisBlock(Filtered):
    """A resolution of the generator. The first one begins with a learned 4x4 picture."""

    def __init__(self, inside: int, outside: int, style: int, side: int, channels: int, clamp: float | None) -> None:
        super().__init__()
        self.side = side
        if not inside:
            self.const = nn.Parameter(torch.randn(outside, side, side))
        self._add_filter()
        if inside:
            self.conv0 = ModulatedConv(inside, outside, style, side, up=True, clamp=clamp)
        self.conv1 = ModulatedConv(outside, outside, style, side, up=False, clamp=clamp)
        self.torgb = ToRgb(outside, channels, style, clamp)

    def forward(self, x: Tensor | None, picture: Tensor | None, styles: Tensor, grain: Grain) -> tuple[Tensor, Tensor]:
        """`styles` [B, 2 or 3, D] are those of the convolutions and of the picture, which is added."""
        rows = styles.unbind(1)
        if x is None:
            x = self.const.expand(len(styles), -1, -1, -1)
        else:
            x = self.conv0(_laid_out(x, self.conv0), rows[0], grain)
        x = self.conv1(x, rows[-2], grain)
        own = self.torgb(x, rows[-1]).to(styles.dtype)
        return x, own if picture is None else self.doubled(picture) + own


class Synthesis(nn.Module):
    """From styles [B, rows, D] to pictures: two convolutions for each resolution, and the sum of all their pictures."""

    def __init__(self, widths: dict[int, int], style: int, channels: int, clamp: float | None, half: int) -> None:
        super().__init__()
        self.rows, self.half = 2 * len(widths), max(8, max(widths) >> (half - 1))
        for inside, (side, outside) in zip((0, *widths.values()), widths.items(), strict=False):
            self.add_module(f"b{side}", SynthesisBlock(inside, outside, style, side, channels, clamp))

    def forward(self, styles: Tensor, grain: Grain = "random") -> Tensor:
        """Pictures of styles. Values have no bounds; the network learns to keep them in -1 to 1."""
        high, styles = _own_precision(styles)
        x = picture = None
        with torch.autocast(styles.device.type, enabled=False):
            for number, block in enumerate(self.children()):
                assert isinstance(block, SynthesisBlock)
                if x is not None and block.side >= self.half:
                    x = x.to(high)
                # A resolution's picture shares the style of the next convolution.
                x, picture = block(x, picture, styles[:, max(2 * number - 1, 0) : 2 * number + 2], grain)
        assert picture is not None
        return picture


class StyleGenerator(nn.Module):
    """A picture from a latent vector (and a label), by way of styles.

    The channels at a resolution are `base` divided by it, and `most` at most. With `clamp` no activation is above it.
    Under autocast the `half` highest resolutions compute in its precision, the others in full precision.
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        *,
        channels: int = 3,
        classes: int = 0,
        latent: int = 512,
        style: int = 512,
        mapping: int = 8,
        base: int = 32768,
        most: int = 512,
        clamp: float | None = None,
        half: int = 4,
    ) -> None:
        super().__init__()
        self.size, self.latent, self.classes = _pair(size), latent, classes
        self.synthesis = Synthesis(_widths(self.size, base, most), style, channels, clamp, half)
        self.mapping = Mapping(latent, classes, style, mapping)

    def forward(
        self,
        z: Tensor,
        label: Tensor | None = None,
        *,
        psi: float = 1.0,
        cutoff: int | None = None,
        grain: Grain | None = None,
    ) -> Tensor:
        return self.drawn(self.styles(z, label, psi=psi, cutoff=cutoff), grain)

    def styles(
        self,
        z: Tensor,
        label: Tensor | None = None,
        *,
        psi: float = 1.0,
        cutoff: int | None = None,
        follow: bool = True,
    ) -> Tensor:
        """A style for each layer [B, rows, D]; with `psi` below 1 the first `cutoff` rows are nearer to their mean."""
        with torch.autocast(z.device.type, enabled=False):
            z = _own_precision(z)[1]
            styles = self.mapping(z, label, follow).unsqueeze(1).repeat(1, self.synthesis.rows, 1)
            if psi == 1:
                return styles
            near = self.mapping.w_avg.lerp(styles, psi)
            return near if cutoff is None else torch.cat([near[:, :cutoff], styles[:, cutoff:]], 1)

    def drawn(self, styles: Tensor, grain: Grain | None = None) -> Tensor:
        """Pictures of styles. Without a word on the noise it is drawn in training, and always the same otherwise."""
        whole = self.synthesis(styles, grain or ("random" if self.training else "const"))
        (height, width), side = self.size, whole.shape[-1]
        top, left = (side - height) // 2, (side - width) // 2
        return whole[:, :, top : top + height, left : left + width]


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


class DiscriminatorBlock(Filtered):
    """Two convolutions that halve the size. With `skip`, a halved 1x1 is added."""

    def __init__(
        self, channels: int | None, inside: int, outside: int, side: int, skip: bool, clamp: float | None
    ) -> None:
        super().__init__()
        self.side = side
        self._add_filter()
        self.fromrgb = None if channels is None else Conv(channels, inside, 1, clamp=clamp)
        self.conv0 = Conv(inside, inside, 3, clamp=clamp)
        self.conv1 = Conv(inside, outside, 3, halve=True, clamp=clamp)
        self.skip = Conv(inside, outside, 1, halve=True, bias=False, clamp=None) if skip else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.fromrgb is None else self.fromrgb(x)
        if self.skip is None:
            return self.conv1(self.conv0(x))
        return self.skip(x, gain=0.5**0.5) + self.conv1(self.conv0(x), gain=0.5**0.5)


class Verdict(nn.Module):
    """The end of a discriminator: `MinibatchDeviation`, a convolution and two linear layers, at 4x4."""

    def __init__(self, width: int, group: int, outputs: int, clamp: float | None) -> None:
        super().__init__()
        self.deviation = MinibatchDeviation(group)
        self.conv = Conv(width + 1, width, 3, clamp=clamp)
        self.fc = Dense(16 * width, width, active=True)
        self.out = Dense(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.fc(self.conv(self.deviation(x)).flatten(1)))


class StyleDiscriminator(nn.Module):
    """A score for each picture. With classes it is a product with a vector of the label.

    `skip` is the published residual network, without it the one called "orig". See `StyleGenerator` for the rest.
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        *,
        channels: int = 3,
        classes: int = 0,
        skip: bool = True,
        group: int = 4,
        base: int = 32768,
        most: int = 512,
        clamp: float | None = None,
        half: int = 4,
    ) -> None:
        super().__init__()
        widths = _widths(_pair(size), base, most)
        self.side, self.half = max(widths), max(8, max(widths) >> (half - 1))
        for side, inside in reversed([*widths.items()][1:]):
            seen = channels if side == self.side else None
            block = DiscriminatorBlock(seen, inside, widths[side // 2], side, skip, clamp)
            self.add_module(f"b{side}", block)
        self.mapping = Mapping(0, classes, widths[4], 8) if classes else None
        self.b4 = Verdict(widths[4], group, widths[4] if classes else 1, clamp)

    def layers(self) -> list[str]:
        """The names of the layers before the last resolution, in order, as FreezeD counts them."""
        return [name for name, layer in self.named_modules() if isinstance(layer, Conv) and not name.startswith("b4.")]

    def forward(self, image: Tensor, label: Tensor | None = None) -> Tensor:
        """Scores [B]. They depend on the whole batch."""
        high, x = _own_precision(image)
        low = x.dtype
        with torch.autocast(image.device.type, enabled=False):
            down, right = (self.side - side for side in x.shape[2:])
            x = F.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2))
            for block in self.children():
                if isinstance(block, DiscriminatorBlock):
                    x = block(_laid_out(x.to(high if block.side >= self.half else low), block.conv1))
            scores = self.b4(x.to(low))
            if self.mapping is None:
                return scores.squeeze(1)
            return (scores * self.mapping(None, label)).sum(1) / scores.shape[1] ** 0.5


def _normal(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-8)


def _clamped(x: Tensor, limit: float | None, gain: float = 1.0) -> Tensor:
    return x if limit is None else x.clamp(-limit * gain, limit * gain)


def _laid_out(x: Tensor, layer: "Conv | ModulatedConv") -> Tensor:
    """In the memory format in which the layer is fast: on CPUs channels last for few channels only (1.4 times)."""
    many = x.is_cpu and min(layer.weight.shape[:2]) >= MANY
    return x.contiguous(memory_format=torch.contiguous_format if many else torch.channels_last)


def _own_precision(x: Tensor) -> tuple[torch.dtype, Tensor]:
    """The type of the high resolutions, which is autocast's where that is on, and x in full precision."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x.dtype, x
    return torch.get_autocast_dtype(kind), x.float()


def _pair(size: int | tuple[int, int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _widths(size: tuple[int, int], base: int, most: int) -> dict[int, int]:
    """The channels of each resolution, from 4 to the next power of two."""
    doublings = max(1, (max(size) - 1).bit_length() - 2)
    return {4 << k: max(1, min(base // (4 << k), most)) for k in range(doublings + 1)}
