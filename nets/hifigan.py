"""The networks of HiFi-GAN, Kong, Kim and Bae 2020: a generator of waves, and the judges of periods and of scales.

Modules have their published names. nets/published/hifigan.py says how weight norm and spectral norm are called there.
The published code means to begin with weights of a standard deviation of 0.01, but weight norm overwrites them: these
are torch's own first weights.
"""

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import pairwise
from operator import add

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from gan.files.errors import UserError
from nets.mel import PIECE
from nets.spectral import spectral_norm

SLOPE = 0.1
PERIODS = (2, 3, 5, 7, 11)


class HifiGenerator(nn.Module):
    """A wave [B, T] from a log mel spectrogram [B, bands, T / hop]; the hop is the product of `rates`.

    Each transposed convolution makes the sequence `rate` times as long and halves the channels, `width` at first.
    Behind it come residual blocks that see patterns of several lengths at once; their mean goes on (section 2.2). Each
    of `kernels` has its `dilations`. In a `twice` block (published: ResBlock1) a plain convolution follows each dilated
    one; V3 has single ones (ResBlock2). The defaults of all networks here are the published ones (V1).
    """

    def __init__(
        self,
        bands: int = 80,
        width: int = 512,
        rates: Sequence[int] = (8, 8, 2, 2),
        up_kernels: Sequence[int] = (16, 16, 4, 4),
        kernels: Sequence[int] = (3, 7, 11),
        dilations: Sequence[Sequence[int]] = ((1, 3, 5),) * 3,
        twice: bool = True,
    ) -> None:
        super().__init__()
        if width % 2 ** len(rates):
            raise UserError(f"a width of {width} cannot be halved {len(rates)} times; try {2 ** len(rates)}")
        for rate, kernel in zip(rates, up_kernels, strict=True):
            if kernel < rate or (kernel - rate) % 2:
                raise UserError(f"a kernel of {kernel} does not make a sound {rate} times as long; try {rate + 2}")
        self.bands, self.width, self.rates, self.up_kernels = bands, width, tuple(rates), tuple(up_kernels)
        self.kernels, self.dilations, self.twice = tuple(kernels), tuple(map(tuple, dilations)), twice
        widths = [width // 2**k for k in range(len(rates) + 1)]
        self.conv_pre = _conv(bands, width, 7)
        self.ups = nn.ModuleList(
            weight_norm(nn.ConvTranspose1d(*pair, kernel, rate, padding=(kernel - rate) // 2))
            for pair, rate, kernel in zip(pairwise(widths), rates, up_kernels, strict=True)
        )
        self.resblocks = nn.ModuleList(
            ResidualBlock(channels, kernel, each, twice)
            for channels in widths[1:]
            for kernel, each in zip(kernels, dilations, strict=True)
        )
        self.conv_post = _conv(widths[-1], 1, 7)
        blocks = zip(kernels, dilations, strict=True)
        inner = max(size // 2 * sum(far + twice for far in each) for size, each in blocks)
        self.reach = 3  # how far a sample hears: here in samples, in the end in frames
        for rate, kernel in zip(reversed(rates), reversed(up_kernels), strict=True):
            self.reach = math.ceil((self.reach + inner + (kernel + rate) // 2 - 1) / rate)
        self.reach += 3

    def forward(self, mel: Tensor) -> Tensor:
        x, several = self.conv_pre(mel), len(self.kernels)
        for number, longer in enumerate(self.ups):
            x = longer(F.leaky_relu(x, SLOPE, inplace=True))
            x = reduce(add, (block(x) for block in self.resblocks[number * several : (number + 1) * several])) / several
        x = F.leaky_relu(x, inplace=True)  # with torch's slope of 0.01, as published
        return self.conv_post(x).tanh().squeeze(1)

    def pieces(self, mel: Tensor, frames: int = PIECE) -> Iterator[Tensor]:
        """The wave in pieces of so many frames, so that memory does not grow with the length of the sound.

        Each piece is made with the frames beside it that it hears, so that together they are what `forward` makes.
        """
        hop = math.prod(self.rates)
        for start in range(0, mel.shape[-1], frames):
            before = min(start, self.reach)
            wave = self(mel[..., start - before : start + frames + self.reach])
            yield wave[..., before * hop : (before + frames) * hop]


class ResidualBlock(nn.Module):
    """For each dilation a dilated convolution is added; with `twice` a plain one follows it first."""

    def __init__(self, width: int, kernel: int, dilations: Sequence[int], twice: bool) -> None:
        super().__init__()
        dilated = nn.ModuleList(_conv(width, width, kernel, dilation) for dilation in dilations)
        if twice:
            self.convs1, self.convs2 = dilated, nn.ModuleList(_conv(width, width, kernel) for _ in dilations)
        else:
            self.convs = dilated
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        for number, dilated in enumerate(self.convs1 if self.twice else self.convs):
            y = dilated(F.leaky_relu(x, SLOPE))
            x = x + (self.convs2[number](F.leaky_relu(y, SLOPE, inplace=True)) if self.twice else y)
        return x


class PeriodJudge(nn.Module):
    """Lays the wave out in rows of `period` samples, and judges each column by itself (section 2.3).

    Convolutions along columns see only samples that are a period apart. All but the last two shorten by 3.
    """

    def __init__(self, period: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.period = period
        layers = [_column_conv(*pair, stride=3) for pair in pairwise((1, *widths))]
        self.convs = nn.ModuleList([*layers, _column_conv(widths[-1], widths[-1], stride=1)])
        self.conv_post = weight_norm(nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0)))

    def forward(self, wave: Tensor) -> list[Tensor]:
        wave = F.pad(wave.unsqueeze(1), (0, -wave.shape[-1] % self.period), "reflect")
        return _features(self, wave.unflatten(-1, (-1, self.period)))


class ScaleJudge(nn.Module):
    """Judges a wave by convolutions with wide kernels, in groups of channels, as in MelGAN (Kumar et al. 2019).

    The first layer keeps the length. Each of the next ones divides it by its stride.
    """

    def __init__(self, widths: Sequence[int], strides: Sequence[int], groups: int, spectral: bool) -> None:
        super().__init__()
        norm = spectral_norm if spectral else weight_norm
        layers: list[nn.Module] = [nn.Conv1d(1, widths[0], 15, padding=7)]
        for number, (pair, stride) in enumerate(zip(pairwise(widths), strides, strict=True)):
            few = max(1, groups // 4) if number == 0 else groups
            layers.append(nn.Conv1d(*pair, 41, stride, padding=20, groups=few))
        layers.append(nn.Conv1d(widths[-1], widths[-1], 41, padding=20, groups=groups))
        layers.append(nn.Conv1d(widths[-1], widths[-1], 5, padding=2))
        self.convs = nn.ModuleList(map(norm, layers))
        self.conv_post = norm(nn.Conv1d(widths[-1], 1, 3, padding=1))

    def forward(self, wave: Tensor) -> list[Tensor]:
        return _features(self, wave.unsqueeze(1))


class PeriodJudges(nn.Module):
    """The multi-period discriminator: a judge for each of some periods, which share few factors."""

    def __init__(self, periods: Sequence[int] = PERIODS, widths: Sequence[int] = (32, 128, 512, 1024)) -> None:
        super().__init__()
        self.discriminators = nn.ModuleList(PeriodJudge(period, widths) for period in periods)

    def forward(self, wave: Tensor) -> list[list[Tensor]]:
        return [judge(wave) for judge in self.discriminators]


class ScaleJudges(nn.Module):
    """Judges of the wave, with spectral norm, and of its means over 2 and 4 samples, with weight norm (section 2.3)."""

    def __init__(
        self,
        scales: int = 3,
        widths: Sequence[int] = (128, 128, 256, 512, 1024),
        strides: Sequence[int] = (2, 2, 4, 4),
        groups: int = 16,
    ) -> None:
        super().__init__()
        judges = (ScaleJudge(widths, strides, groups, number == 0) for number in range(scales))
        self.discriminators = nn.ModuleList(judges)

    def forward(self, wave: Tensor) -> list[list[Tensor]]:
        found = []
        for number, judge in enumerate(self.discriminators):
            if number:
                wave = F.avg_pool1d(wave.unsqueeze(1), 4, 2, padding=2).squeeze(1)
            found.append(judge(wave))
        return found


class Judges(nn.Module):
    """Both discriminators, which one optimizer updates, as in the published training."""

    def __init__(self, msd: ScaleJudges, mpd: PeriodJudges) -> None:
        super().__init__()
        self.msd, self.mpd = msd, mpd

    def forward(self, wave: Tensor) -> dict[str, list[list[Tensor]]]:
        return {"mpd": self.mpd(wave), "msd": self.msd(wave)}


def _conv(inside: int, outside: int, kernel: int, dilation: int = 1) -> nn.Module:
    return weight_norm(nn.Conv1d(inside, outside, kernel, dilation=dilation, padding=dilation * (kernel // 2)))


def _column_conv(inside: int, outside: int, stride: int) -> nn.Module:
    return weight_norm(nn.Conv2d(inside, outside, (5, 1), (stride, 1), padding=(2, 0)))


def _features(judge: PeriodJudge | ScaleJudge, x: Tensor) -> list[Tensor]:
    features = []
    for layer in judge.convs:
        x = F.leaky_relu(layer(x), SLOPE, inplace=True)
        features.append(x)
    return [*features, judge.conv_post(x)]
