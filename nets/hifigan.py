"""The networks of HiFi-GAN, Kong, Kim and Bae 2020: a generator of waves, and the judges of periods and of scales."""

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from operator import add

from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from gan.files.errors import UserError
from nets.spectral import spectral_norm

SLOPE = 0.1
MEAN, SPREAD = -5.0, 2.0  # of log mel spectrograms, about
PERIODS = (2, 3, 5, 7, 11)


class HifiGenerator(nn.Module):
    """A wave [B, T] from a log mel spectrogram [B, bands, T / hop]; the hop is the product of `strides`.

    Each transposed convolution makes the sequence `stride` times as long and halves the channels, `width` at first.
    Behind it comes a fusion of receptive fields. The defaults of all networks here are the published ones (V1).
    """

    def __init__(
        self,
        bands: int = 80,
        width: int = 512,
        strides: Sequence[int] = (8, 8, 2, 2),
        kernels: Sequence[int] = (3, 7, 11),
        dilations: Sequence[int] = (1, 3, 5),
    ) -> None:
        super().__init__()
        if width % 2 ** len(strides):
            raise UserError(f"a width of {width} cannot be halved {len(strides)} times; try {2 ** len(strides)}")
        widths = [width // 2**k for k in range(len(strides) + 1)]
        self.start = _conv(bands, width, 7)
        self.ups = nn.ModuleList(_up(*pair, stride) for pair, stride in zip(pairwise(widths), strides, strict=True))
        self.fusions = nn.ModuleList(Fusion(channels, kernels, dilations) for channels in widths[1:])
        self.end = _conv(widths[-1], 1, 7)

    def forward(self, mel: Tensor) -> Tensor:
        # The published network takes the logs as they are. Centred ones are learned from in half as many steps.
        x = self.start((mel - MEAN) / SPREAD)
        for longer, fusion in zip(self.ups, self.fusions, strict=True):
            x = fusion(longer(F.leaky_relu(x, SLOPE)))
        return self.end(F.leaky_relu(x, SLOPE)).tanh().squeeze(1)


class Fusion(nn.Module):
    """The mean of residual blocks that see patterns of several lengths at once (section 2.2)."""

    def __init__(self, width: int, kernels: Sequence[int], dilations: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(width, kernel, dilations) for kernel in kernels)

    def forward(self, x: Tensor) -> Tensor:
        return reduce(add, (block(x) for block in self.blocks)) / len(self.blocks)


class ResidualBlock(nn.Module):
    """For each dilation two convolutions are added, of which the first is dilated."""

    def __init__(self, width: int, kernel: int, dilations: Sequence[int]) -> None:
        super().__init__()
        self.dilated = nn.ModuleList(_conv(width, width, kernel, dilation=dilation) for dilation in dilations)
        self.plain = nn.ModuleList(_conv(width, width, kernel) for _ in dilations)

    def forward(self, x: Tensor) -> Tensor:
        for dilated, plain in zip(self.dilated, self.plain, strict=True):
            x = x + plain(F.leaky_relu(dilated(F.leaky_relu(x, SLOPE)), SLOPE))
        return x


class PeriodJudge(nn.Module):
    """Lays the wave out in rows of `period` samples, and judges each column by itself (section 2.3).

    Convolutions along columns see only samples that are a period apart. All but the last two shorten by 3.
    """

    def __init__(self, period: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.period = period
        layers = [_column_conv(*pair, stride=3) for pair in pairwise((1, *widths))]
        self.layers = nn.ModuleList([*layers, _column_conv(widths[-1], widths[-1], stride=1)])
        self.score = weight_norm(nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0)))

    def forward(self, wave: Tensor) -> list[Tensor]:
        """The features of each layer; the scores come last."""
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
        self.layers = nn.ModuleList(map(norm, layers))
        self.score = norm(nn.Conv1d(widths[-1], 1, 3, padding=1))

    def forward(self, wave: Tensor) -> list[Tensor]:
        """The features of each layer; the scores come last."""
        return _features(self, wave.unsqueeze(1))


class PeriodJudges(nn.Module):
    """The multi-period discriminator: a judge for each of some periods, which share few factors."""

    def __init__(self, periods: Sequence[int] = PERIODS, widths: Sequence[int] = (32, 128, 512, 1024)) -> None:
        super().__init__()
        self.judges = nn.ModuleList(PeriodJudge(period, widths) for period in periods)

    def forward(self, wave: Tensor) -> list[list[Tensor]]:
        """A list of features for each judge; the scores come last in each list."""
        return [judge(wave) for judge in self.judges]


class ScaleJudges(nn.Module):
    """The multi-scale discriminator: judges of the wave, and of its means over 2 and 4 samples.

    The first has spectral norm and the others weight norm (section 2.3).
    """

    def __init__(
        self,
        scales: int = 3,
        widths: Sequence[int] = (128, 128, 256, 512, 1024),
        strides: Sequence[int] = (2, 2, 4, 4),
        groups: int = 16,
    ) -> None:
        super().__init__()
        self.judges = nn.ModuleList(ScaleJudge(widths, strides, groups, number == 0) for number in range(scales))

    def forward(self, wave: Tensor) -> list[list[Tensor]]:
        """A list of features for each judge; the scores come last in each list."""
        found = []
        for number, judge in enumerate(self.judges):
            if number:
                wave = F.avg_pool1d(wave.unsqueeze(1), 4, 2, padding=2).squeeze(1)
            found.append(judge(wave))
        return found


def _conv(inside: int, outside: int, kernel: int, dilation: int = 1) -> nn.Module:
    return weight_norm(nn.Conv1d(inside, outside, kernel, dilation=dilation, padding=dilation * (kernel // 2)))


def _up(inside: int, outside: int, stride: int) -> nn.Module:
    """Makes a sequence exactly `stride` times as long."""
    spare = stride % 2
    padding = stride // 2 + spare
    layer = nn.ConvTranspose1d(inside, outside, 2 * stride, stride, padding=padding, output_padding=spare)
    return weight_norm(layer)


def _column_conv(inside: int, outside: int, stride: int) -> nn.Module:
    return weight_norm(nn.Conv2d(inside, outside, (5, 1), (stride, 1), padding=(2, 0)))


def _features(judge: PeriodJudge | ScaleJudge, x: Tensor) -> list[Tensor]:
    features = []
    for layer in judge.layers:
        x = F.leaky_relu(layer(x), SLOPE)
        features.append(x)
    return [*features, judge.score(x)]
