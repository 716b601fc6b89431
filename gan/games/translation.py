"""What games of translation tell `gan.sample --inputs`, and which ways published networks have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from nets.resnet import ResnetGenerator, UNet
from nets.vqgan import VqAutoencoder


@dataclass(frozen=True)
class Translation:
    """A way from a picture to another one: a function of pictures [B, channels, height, width] from -1 to 1.

    One way may take maps of codes [B, h, w] in place of pictures: `codes` is then how many codes there are, else 0.
    Another way may give such maps: then `encodes` is true. A way from label maps [B, 1, height, width] has `labels`,
    how many there are, and `void`: other values in files, and the label that each stands for.

    A game has them in a method `translations()`, by names such as "AtoB". That is all that `gan.sample RUN --inputs`
    asks of it. Pictures are padded to sides that are a `multiple`, and the result is cut back.
    """

    paint: Callable[[Tensor], Tensor]
    channels: int
    multiple: int = 1
    codes: int = 0
    encodes: bool = False
    labels: int = 0
    void: Mapping[int, int] = field(default_factory=dict)


def of_generator(net: UNet | ResnetGenerator) -> Translation:
    return Translation(net, net.inside, 2**net.depth if isinstance(net, UNet) else 1)


def of_autoencoder(net: VqAutoencoder) -> dict[str, Translation]:
    return {
        "painted again": Translation(lambda image: net(image)[0], net.channels),
        "codes": Translation(net.numbers, net.channels, encodes=True),
        "pictures": Translation(net.draw, net.channels, codes=net.quantize.size),
    }
