"""How far two pictures are from each other in the features of a network: LPIPS, or by a run's own discriminator."""

from collections.abc import Callable
from pathlib import Path

import torch
import torchmetrics.functional.image
from torch import Tensor
from torch.nn import functional as F

from gan.app.scoring.features import read_weights
from gan.files.disk import load_plain
from gan.files.errors import UserError
from nets.stylegan import DiscriminatorBlock, StyleDiscriminator
from nets.vgg import Vgg16

LARGEST = 256  # pixels of a side that LPIPS looks at, as in the published projector
SMALLEST = 16  # pixels that VGG-16's poolings halve


class Likeness:
    """The distance of pictures from a target, in features that are compared as LPIPS does: Zhang et al. 2018, eq. 1.

    `features` gives, of pictures, the activations of some layers, of which the vector at each position has unit length.
    """

    def __init__(self, name: str, features: Callable[[Tensor], list[Tensor]], target: Tensor) -> None:
        self.name, self.features = name, features
        with torch.no_grad():
            self.target = features(target)

    def __call__(self, pictures: Tensor) -> Tensor:
        pairs = zip(self.features(pictures), self.target, strict=True)
        return sum(((one - other).square().sum(1).mean() for one, other in pairs), torch.zeros(()))


def by_discriminator(net: StyleDiscriminator) -> Callable[[Tensor], list[Tensor]]:
    """What each resolution of a discriminator gives."""

    def features(pictures: Tensor) -> list[Tensor]:
        found: list[Tensor] = []
        blocks = [block for block in net.children() if isinstance(block, DiscriminatorBlock)]
        hooks = [block.register_forward_hook(lambda *made: found.append(_unit(made[-1]))) for block in blocks]
        classes = net.mapping.classes if net.mapping is not None else 0
        net(pictures, pictures.new_zeros(len(pictures), classes))
        for hook in hooks:
            hook.remove()
        return found

    return features


def by_lpips(file: Path, device: torch.device) -> Callable[[Tensor], list[Tensor]]:
    """LPIPS 0.1 with torchvision's VGG-16, whose weights are in the file; what was learned on top is in torchmetrics."""
    try:
        net = Vgg16(read_weights(file, "VGG-16's weights"), normalise=True).to(device)
    except ValueError as error:
        raise UserError(f"{file} does not hold VGG-16 as torchvision saves it; bring vgg16-397923af.pth") from error
    learned = load_plain(Path(torchmetrics.functional.image.__file__).with_name("lpips_models") / "vgg.pth")
    scales = [learned[f"lin{number}.model.1.weight"].sqrt().to(device) for number in range(len(net.relus))]

    def features(pictures: Tensor) -> list[Tensor]:
        if min(pictures.shape[2:]) < SMALLEST:
            raise UserError(f"LPIPS cannot see pictures below {SMALLEST} pixels; leave --perceptual out")
        if max(pictures.shape[2:]) > LARGEST:
            share = LARGEST / max(pictures.shape[2:])
            pictures = F.interpolate(pictures, [round(share * side) for side in pictures.shape[2:]], mode="area")
        found = net(pictures[:, :3].expand(-1, 3, -1, -1))
        return [_unit(each) * scale for each, scale in zip(found, scales, strict=True)]

    return features


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(1, keepdim=True) + 1e-8).sqrt()
