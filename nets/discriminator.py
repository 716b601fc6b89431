"""Patch discriminators: every score judges a patch, and inner features come along for feature matching."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from nets.blocks import SLOPE, conv


class PatchDiscriminator(nn.Module):
    """The PatchGAN of Isola et al. 2017, in the padding of pix2pixHD (Wang et al. 2018).

    `layers` convolutions 4x4 of stride 2, from `width` channels doubling to 512 at most, then the score. All but
    the first and the score are normalised picture by picture, so a score does not depend on the batch, and have no
    bias; `spectral` bounds their slope as well, as SPADE and SEAN do.
    """

    def __init__(
        self, inside: int, width: int = 64, layers: int = 3, spectral: bool = False, gain: float = 0.02
    ) -> None:
        super().__init__()
        widths = [width, *(min(width * 2**k, 512) for k in range(1, layers))]
        stages: list[nn.Module] = [
            nn.Sequential(conv(inside, width, 4, 2, gain=gain), nn.LeakyReLU(SLOPE, inplace=True))
        ]
        for before, after in pairwise(widths):
            layer = conv(before, after, 4, 2, bias=False, spectral=spectral, gain=gain)
            stages.append(nn.Sequential(layer, nn.InstanceNorm2d(after), nn.LeakyReLU(SLOPE, inplace=True)))
        stages.append(conv(widths[-1], 1, 4, gain=gain))
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Every stage's features, the scores last."""
        features = []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        return features


class MultiScaleDiscriminator(nn.Module):
    """Patch discriminators on the picture and on smaller and smaller ones (Wang et al. 2018)."""

    def __init__(
        self, inside: int, width: int = 64, layers: int = 3, scales: int = 2, spectral: bool = True, gain: float = 0.02
    ) -> None:
        super().__init__()
        self.scales = nn.ModuleList(PatchDiscriminator(inside, width, layers, spectral, gain) for _ in range(scales))

    def forward(self, x: Tensor) -> list[list[Tensor]]:
        """One list of features a scale, the scores last in each."""
        found = []
        for number, scale in enumerate(self.scales):
            if number:
                x = F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)
            found.append(scale(x))
        return found
