"""The look of a face: a colour and a texture for each region."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

import numpy as np
from PIL import Image

from datasets.drawn.drawing import TONES, Region, Tone
from gan.noise import seed_for

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


Colour = tuple[int, int, int]


class Style(NamedTuple):
    """How a region is painted: its texture runs from colour - swing to colour + swing."""

    colour: Colour
    swing: float
    texture: str


def _hex(colours: str) -> list[Colour]:
    return [(red, green, blue) for red, green, blue in map(bytes.fromhex, colours.split())]


_SKIN = _hex("f8dcc8 f0c3a2 dda57f bd8058 945f40 6a432e a8cfae a9b8e4 d8b0d8 efcf86")
_HAIR = _hex("2f272b 5c3d2b 91603a cb9452 ead494 b84c31 8e929b e9e4de 4282b4 b44f90 4f9b78 7d62bf")
_EYE = _hex("f5f7f8 dcecf5 fdf0cf d6f0df f7dde8 c9e3f0 e5dcf7 f9d9c4")
_LIP = _hex("c25d66 da8a84 a33f57 e27f90 8f414d f0906f 7f5098 b9717c")
_METAL = _hex("f1c453 dde1e6 e28465 a9dccb c58af0 f6a5c0 6fb7e8")
_FABRIC = _hex("33658a 86bbd8 758e4f f6ae2d e4613b 2f4858 9a4c6b d8c99b 5f4bb6 3fa796 e8e2d6 c44536 f2a7b5 22333b")
_WALL = _hex("c9d6df f4d9c6 d5e3c8 f6e7b4 dccdea b8d8d8 f2c6c2 8fa6b8 6b7f99 e9e4dc a3c4a8 40506b")

# The colours to choose from, and the largest swing of a texture: clothes have stronger patterns than skin.
_WARDROBE: dict[Region, tuple[list[Colour], float]] = {
    **dict.fromkeys((Region.SKIN, Region.NOSE, Region.NECK, Region.L_EAR, Region.R_EAR), (_SKIN, 12)),
    **dict.fromkeys((Region.HAIR, Region.L_BROW, Region.R_BROW), (_HAIR, 22)),
    **dict.fromkeys((Region.L_EYE, Region.R_EYE), (_EYE, 10)),
    **dict.fromkeys((Region.U_LIP, Region.L_LIP, Region.MOUTH), (_LIP, 14)),
    **dict.fromkeys((Region.EAR_R, Region.NECK_L), (_METAL, 14)),
    **dict.fromkeys((Region.CLOTH, Region.HAT, Region.EYE_G), (_FABRIC, 30)),
    Region.BACKGROUND: (_WALL, 18),
}


def any_style(seed: int, face: int, region: Region) -> Style:
    """Another style for every region of every face."""
    colours, swing = _WARDROBE[region]
    dice = Random(seed_for("style", seed, face, int(region))).random
    colour = colours[int(dice() * len(colours))]
    red, green, blue = (min(255, max(0, round(channel + 20 * dice() - 10))) for channel in colour)
    return Style((red, green, blue), swing * (0.4 + 0.6 * dice()), list(TEXTURES)[int(dice() * len(TEXTURES))])


def _fixed(swing: float, texture: str, colours: str) -> Callable[[int, int, Region], Style]:
    styles = [Style(colour, swing, texture) for colour in _hex(colours)]
    return lambda seed, face, region: styles[region]


# Fixed palettes, in the order of the labels.
_POSTER = """bfd6dc edbd9b e6ae8c 3c5a73 f4f6f7 f4f6f7 5b3a2e 5b3a2e e5ac8a e5ac8a
a8434c c9625f d67a73 6e4433 c9493f e9bf57 e9bf57 e2ae8d 34618c"""
_NEON = """15112e ff4fa3 ff7dbb 6d5cff f6ff7a f6ff7a 20e3ff 20e3ff e0348a e0348a
6a1fb0 ff8a2b ffa44f 20d9ff ffd21f ffffff ffffff c92c86 7dff4a"""

LOOKS: dict[str, Callable[[int, int, Region], Style]] = {
    "any": any_style,
    "poster": _fixed(3, "small dots", _POSTER),
    "neon": _fixed(6, "fine slants", _NEON),
}


def paint(cells: np.ndarray, styles: Sequence[Style], size: int) -> Image.Image:
    """The picture of a portrait's cells with a style for each region, reduced to size x size."""
    # Compute the colour of every cell at every level of its texture.
    colour, swing = np.array([style.colour for style in styles]), np.array([style.swing for style in styles])
    ramp = colour[:, None] + swing[:, None, None] * np.linspace(-1, 1, LEVELS)[:, None]
    ramp = ramp[:, None] * _FACTOR[:, None]
    ramp += (255 - ramp) * _WHITE[:, None, None]
    table = np.zeros((*ramp.shape[:3], 4), np.uint8)
    table[..., :3] = np.clip(ramp + 0.5, 0, 255)

    textures = list(TEXTURES)
    start = np.repeat([textures.index(style.texture) * size**2 for style in styles], len(Tone))
    level = texture_levels(size).take(start.take(cells) + _pixels(size, len(cells)))
    points = table.view(np.uint32).ravel().take(cells * np.intp(LEVELS) + level)
    return Image.frombuffer("RGBX", points.shape, points).reduce(len(cells) // size).convert("RGB")


_FACTOR = np.array([TONES[tone][:3] for tone in Tone])
_WHITE = np.array([TONES[tone][3] for tone in Tone])


@lru_cache(4)
def _pixels(size: int, side: int) -> np.ndarray:
    row = np.arange(side) // (side // size)
    return row[:, None] * size + row
