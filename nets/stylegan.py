"""StyleGAN2's networks as published (Karras et al. 2020), with the names of the published weights, in plain torch.

Sizes that are no power of two, or not square, are the middle of the next power of two.
"""

import torch
from torch import Tensor, nn

from nets.blocks import doubled, laid_out, middle
from nets.stylegan_layers import Conv, Dense, Filtered, Grain, Mapping, MinibatchDeviation, ModulatedConv, ToRgb


class SynthesisBlock(Filtered):
    """A resolution of the generator. The first one begins with a learned 4x4 picture."""

    def __init__(self, inside: int, outside: int, style: int, side: int, channels: int, clamp: float | None) -> None:
        super().__init__()
        self.side = side
        if not inside:
            self.const = nn.Parameter(torch.randn(outside, side, side))
        if inside:
            self.conv0 = ModulatedConv(inside, outside, style, side, up=True, clamp=clamp)
        self.conv1 = ModulatedConv(outside, outside, style, side, up=False, clamp=clamp)
        self.torgb = ToRgb(outside, channels, style, clamp)

    def forward(self, x: Tensor | None, picture: Tensor | None, styles: Tensor, grain: Grain) -> tuple[Tensor, Tensor]:
        """`styles` [B, 2 or 3, D] are those of the convolutions and of the picture, which is added."""
        rows = styles.unbind(1)
        if x is None:
            x = self.const.expand(styles.shape[0], -1, -1, -1)
        else:
            x = self.conv0(laid_out(x, self.conv0), rows[0], grain)
        x = self.conv1(x, rows[-2], grain)
        own = self.torgb(x, rows[-1]).to(styles.dtype)
        return x, own if picture is None else doubled(picture) + own


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
        self.size, self.channels, self.latent, self.classes = _pair(size), channels, latent, classes
        self.synthesis = Synthesis(_widths(self.size, base, most), style, channels, clamp, half)
        self.mapping = Mapping(latent, classes, style, mapping)

    def forward(
        self,
        z: Tensor,
        label: Tensor | None = None,
        *,
        psi: float = 1.0,
        cutoff: int | None = None,
        follow: bool = True,
        grain: Grain | None = None,
    ) -> Tensor:
        """Pictures, as `drawn`, of styles, as `styles`, which truncates by `psi`."""
        return self.drawn(self.styles(z, label, psi=psi, cutoff=cutoff, follow=follow), grain)

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
        return middle(self.synthesis(styles, grain or ("random" if self.training else "const")), *self.size)


class DiscriminatorBlock(Filtered):
    """Two convolutions that halve the size. With `skip`, a halved 1x1 is added."""

    def __init__(
        self, channels: int | None, inside: int, outside: int, side: int, skip: bool, clamp: float | None
    ) -> None:
        super().__init__()
        self.side = side
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
            x = middle(x, self.side, self.side)
            for block in self.children():
                if isinstance(block, DiscriminatorBlock):
                    x = block(laid_out(x.to(high if block.side >= self.half else low), block.conv1))
            scores = self.b4(x.to(low))
            if self.mapping is None:
                return scores.squeeze(1)
            return (scores * self.mapping(None, label)).sum(1) / scores.shape[1] ** 0.5


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
