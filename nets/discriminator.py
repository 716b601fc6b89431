"""What looks at patches of a picture, of which each score judges one: SPADE's and SEAN's discriminators, whose features
are returned too, the PatchGAN of pix2pix, CycleGAN, CUT and VQGAN, and CUT's vectors.

The names of modules and parameters are the published ones, so a published state dict fits.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan.files.errors import UserError
from nets.blocks import SLOPE, conv, start_
from nets.resnet import Blur, Norm, normed


class PatchDiscriminator(nn.Module):
    """The PatchGAN of Isola et al. 2017, with the padding of pix2pixHD (Wang et al. 2018).

    There are `layers` 4x4 convolutions of stride 2, whose channels double from `width` to 512 at most, and then the
    score. All but the first layer and the score have no bias, spectral norm and an instance norm, as in SPADE and SEAN,
    so a score does not depend on the rest of the batch.
    """

    def __init__(self, inside: int, width: int = 64, layers: int = 3, gain: float = 0.02) -> None:
        super().__init__()
        widths = [width, *(min(width * 2**k, 512) for k in range(1, layers))]
        stages: list[nn.Module] = [
            nn.Sequential(conv(inside, width, 4, 2, gain=gain), nn.LeakyReLU(SLOPE, inplace=True))
        ]
        for before, after in pairwise(widths):
            layer = conv(before, after, 4, 2, bias=False, spectral=True, gain=gain)
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

    def __init__(self, inside: int, width: int = 64, layers: int = 3, scales: int = 2, gain: float = 0.02) -> None:
        super().__init__()
        for number in range(scales):
            self.add_module(f"discriminator_{number}", PatchDiscriminator(inside, width, layers, gain))

    def forward(self, x: Tensor) -> list[list[Tensor]]:
        """A list of features for each scale; the scores come last in each list."""
        found = []
        for number, scale in enumerate(self.children()):
            if number:
                # With padding and channels last, torch's gradient on a GPU was wrong until July 2026: pytorch#188344.
                x = F.avg_pool2d(x.contiguous(), 3, 2, 1, count_include_pad=False)
            found.append(scale(x))
        return found


class PatchGan(nn.Module):
    """The discriminator of Isola et al. 2017, as published.

    `layers` 4x4 convolutions of stride 2, one of stride 1, and then the score. The channels double from `width` to 8
    times `width` at most. All convolutions but the first and the last have a norm. With 3 `layers` a patch has 70
    pixels a side. With `smooth` blurring filters halve the picture, as in CUT, in place of the stride.
    """

    def __init__(
        self, inside: int, width: int = 64, layers: int = 3, norm: Norm = "batch", smooth: bool = False
    ) -> None:
        super().__init__()
        if layers < 1:
            raise UserError(f"a PatchGAN of {layers} layers sees no patches; take 1 or more, or the judge of pixels")
        widths = [width * min(2**number, 8) for number in range(layers + 1)]
        stride = 1 if smooth else 2
        stages = [[conv(inside, width, 4, stride, 1)]]
        stages += [normed(norm, before, after, 4, stride, 1) for before, after in pairwise(widths[:-1])]
        model: list[nn.Module] = []
        for stage, channels in zip(stages, widths, strict=False):
            model += [*stage, nn.LeakyReLU(SLOPE, inplace=True), *([Blur(channels)] if smooth else [])]
        model += [*normed(norm, *widths[-2:], 4, 1, 1), nn.LeakyReLU(SLOPE, inplace=True)]
        self.model = nn.Sequential(*model, conv(widths[-1], 1, 4, 1, 1))
        self.smallest = 3 * 2**layers  # pixels of a side
        start_(self)

    def forward(self, x: Tensor) -> Tensor:
        """The scores [B, 1, h, w]."""
        if min(x.shape[-2:]) < self.smallest:
            height, width = x.shape[-2:]
            raise UserError(
                f"a picture of {width}x{height} is too small for this PatchGAN, which needs {self.smallest} pixels a "
                "side; take larger pictures or fewer layers"
            )
        return self.model(x)


class PixelGan(nn.Module):
    """The judge of single pixels of Isola et al. 2017: a PatchGAN whose patches are one pixel."""

    def __init__(self, inside: int, width: int = 64, norm: Norm = "batch") -> None:
        super().__init__()
        self.net = nn.Sequential(
            conv(inside, width, 1),
            nn.LeakyReLU(SLOPE, inplace=True),
            *normed(norm, width, 2 * width, 1),
            nn.LeakyReLU(SLOPE, inplace=True),
            conv(2 * width, 1, 1, bias=norm == "instance"),
        )
        start_(self)

    def forward(self, x: Tensor) -> Tensor:
        """The scores [B, 1, H, W]."""
        return self.net(x)


class PatchVectors(nn.Module):
    """A perceptron of two layers for each layer of features, whose outputs have length one. The published `length`
    is 256, and the published names are those of F, `mlp_sample`.

    The published network is made in its first forward. Here the channels of the features are given.
    """

    def __init__(self, channels: Sequence[int], length: int = 256) -> None:
        super().__init__()
        for number, inside in enumerate(channels):
            layers = nn.Sequential(nn.Linear(inside, length), nn.ReLU(inplace=True), nn.Linear(length, length))
            self.add_module(f"mlp_{number}", layers)
        start_(self, xavier=True)

    def forward(self, features: Sequence[Tensor], places: Sequence[Tensor]) -> list[Tensor]:
        """For each layer the vectors [B, P, length] at P places, which are numbers of pixels, row by row."""
        found = []
        for layer, each, where in zip(self.children(), features, places, strict=True):
            vectors = layer(each.flatten(2).index_select(2, where).transpose(1, 2))
            found.append(vectors / (torch.linalg.vector_norm(vectors, dim=2, keepdim=True) + 1e-7))
        return found
