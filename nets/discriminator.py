"""Patch discriminators: each score judges a patch. Inner features are returned too, for feature matching.

The names of modules and parameters are the published ones.
"""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from nets.blocks import SLOPE, conv


class PatchDiscriminator(nn.Module):
    """The PatchGAN of Isola et al. 2017, with the padding of pix2pixHD (Wang et al. 2018).

    There are `layers` 4x4 convolutions of stride 2, whose channels double from `width` to 512 at most, and then the
    score. All but the first layer and the score have no bias and an instance norm, so a score does not depend on the
    rest of the batch. With `spectral` they have spectral norm too, as in SPADE and SEAN.
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
            normed = nn.Sequential(layer, nn.InstanceNorm2d(after))
            stages.append(nn.Sequential(normed, nn.LeakyReLU(SLOPE, inplace=True)))
        stages.append(nn.Sequential(conv(widths[-1], 1, 4, gain=gain)))
        for number, stage in enumerate(stages):
            self.add_module(f"model{number}", stage)

    def forward(self, x: Tensor) -> list[Tensor]:
        """The features of each stage; the scores come last."""
        features = []
        for stage in self.children():
            x = stage(x)
            features.append(x)
        return features


class MultiScaleDiscriminator(nn.Module):
    """Patch discriminators on the picture and on smaller copies of it (Wang et al. 2018)."""

    def __init__(
        self, inside: int, width: int = 64, layers: int = 3, scales: int = 2, spectral: bool = True, gain: float = 0.02
    ) -> None:
        super().__init__()
        for number in range(scales):
            self.add_module(f"discriminator_{number}", PatchDiscriminator(inside, width, layers, spectral, gain))

    def forward(self, x: Tensor) -> list[list[Tensor]]:
        """A list of features for each scale; the scores come last in each list."""
        found = []
        for number, scale in enumerate(self.children()):
            if number:
                # With padding and channels last, torch's gradient on a GPU was wrong until July 2026: pytorch#188344.
                x = F.avg_pool2d(x.contiguous(), 3, 2, 1, count_include_pad=False)
            found.append(scale(x))
        return found
