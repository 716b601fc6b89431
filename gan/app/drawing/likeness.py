"""How far pictures are from a target in the features of a network: by LPIPS, or by a run's own discriminator."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from gan.files.errors import UserError
from nets.lpips import load_lpips
from nets.stylegan import DiscriminatorBlock, StyleDiscriminator
from nets.vgg import SMALLEST

LARGEST = 256  # pixels of a side that LPIPS looks at, as in the published projector
Features = Callable[[Tensor], list[Tensor]]  # of pictures, what some layers make of them


def distance_from(target: Tensor, features: Features) -> Callable[[Tensor], Tensor]:
    """The distance of pictures from a target: that of LPIPS, in any features whose vectors have unit length."""
    with torch.no_grad():
        wanted = features(target)

    # Zhang et al. 2018, equation 1
    def distance(pictures: Tensor) -> Tensor:
        pairs = zip(features(pictures), wanted, strict=True)
        return torch.stack([(one - other).square().sum(1).mean() for one, other in pairs]).sum()

    return distance


def by_discriminator(net: StyleDiscriminator) -> Features:
    """What each resolution of a discriminator gives."""

    def features(pictures: Tensor) -> list[Tensor]:
        found = [pictures]
        for block in net.children():
            if isinstance(block, DiscriminatorBlock):
                found.append(block(found[-1]))
        return [_unit(each) for each in found[1:]]

    return features


def by_lpips(file: Path, device: torch.device) -> Features:
    """LPIPS with the weights of torchvision's VGG-16 in that file."""
    net = load_lpips(str(file)).to(device)

    def features(pictures: Tensor) -> list[Tensor]:
        sides = pictures.shape[2:]
        if min(sides) < SMALLEST:
            raise UserError(f"LPIPS cannot see pictures below {SMALLEST} pixels; leave --perceptual out")
        if max(sides) > LARGEST:
            pictures = F.interpolate(pictures, [round(side * LARGEST / max(sides)) for side in sides], mode="area")
        return net.embed(pictures)

    return features


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(1, keepdim=True) + 1e-8).sqrt()
