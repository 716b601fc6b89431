"""Textures: patterns of levels over the whole picture; a region shows the part inside it."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

LEVELS = 15  # the middle one is the region's colour, the first and the last are the extremes

Pattern = Callable[[np.ndarray, np.ndarray], np.ndarray]


def _wave(turns: np.ndarray) -> np.ndarray:
    """A wave with flat tops, so that stripes look like stripes."""
    return np.clip(1.6 * np.sin(2 * np.pi * turns), -1, 1)


def _slants(count: int) -> Pattern:
    return lambda u, v: _wave(count * (u + v) / 2**0.5)


def _dots(count: int) -> Pattern:
    return lambda u, v: np.clip(
        1.5 * np.cos(2 * np.pi * count * u) + 1.5 * np.cos(2 * np.pi * count * v) - 1.2, -0.5, 1
    )


# Functions of the position (u, v) in the picture, from 0 to 1; the numbers count repeats across the picture.
TEXTURES: dict[str, Pattern] = {
    "plain": lambda u, v: 0 * u,
    "stripes": lambda u, v: _wave(6 * u),
    "fine stripes": lambda u, v: _wave(11 * u),
    "bars": lambda u, v: _wave(6 * v),
    "fine bars": lambda u, v: _wave(11 * v),
    "slants": _slants(6),
    "fine slants": _slants(10),
    "checks": lambda u, v: _wave(5 * u) * _wave(5 * v),
    "fine checks": lambda u, v: _wave(9 * u) * _wave(9 * v),
    "dots": _dots(7),
    "small dots": _dots(11),
    "waves": lambda u, v: _wave(7 * v + 0.35 * np.sin(8 * np.pi * u)),
    "rings": lambda u, v: _wave(8 * np.hypot(u - 0.5, v - 0.5)),
    "fade down": lambda u, v: 2 * v - 1,
    "fade right": lambda u, v: 2 * u - 1,
}


@lru_cache(4)
def texture_levels(size: int) -> np.ndarray:
    """The levels of all textures at a size, as bytes [texture, row, column]; computed once for all faces."""
    middle = (np.arange(size) + 0.5) / size
    u, v = np.meshgrid(middle, middle)
    drawn = np.stack([pattern(u, v) for pattern in TEXTURES.values()])
    return np.rint((drawn + 1) / 2 * (LEVELS - 1)).astype(np.uint8)
