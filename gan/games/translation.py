"""What games of translation tell `gan.sample --inputs`."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Translation:
    """A way from a picture to another one: a function of pictures [B, channels, height, width] from -1 to 1.

    If it has so many `codes`, it takes maps of their numbers [B, h, w] in place of pictures. With `encodes` it gives
    such maps.

    A game has them in a method `translations()`, by names such as "AtoB". That is all that `gan.sample RUN --inputs`
    asks of it. Pictures are padded to sides that are a `multiple`, and the result is cut back.
    """

    paint: Callable[[Tensor], Tensor]
    channels: int
    multiple: int = 1
    codes: int = 0
    encodes: bool = False
