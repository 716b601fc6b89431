"""Faces drawn from a seed: a data set with labels and with ground truth, and nothing to download.

The shape of a face and the style of its regions are drawn separately. So the right result of a style transfer is
known: the shape of one face, drawn in the styles of another.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import tv_tensors

from datasets.drawn.drawing import FLIP_PAIRS, LABELS, TONES, Region, Tone
from datasets.drawn.portrait import draw_portrait, supersampling
from gan.files.errors import UserError
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


MOST = 10**9  # faces of a set: the order of an epoch is an array
MEMORY = 1 << 30  # bytes of drawn pictures that a data set keeps; others are drawn again each time


class Faces(Dataset):
    """Faces number `first` to `first + length - 1` of a seed: pictures and their maps of 19 labels.

    Face k of a seed is the same in every data set, for any length, process or number of workers. `look` is "any", where
    each region of each face has its own style, or "poster" or "neon", where all faces share one palette.
    """

    num_labels, label_names, flip_pairs = len(LABELS), LABELS, FLIP_PAIRS

    def __init__(self, length: int, size: int = 64, seed: int = 0, first: int = 0, look: str = "any") -> None:
        if size < 16:
            raise UserError(f"faces of size {size} are too small to be seen; try size 16 or more")
        if not 1 <= length <= MOST:
            raise UserError(f"there can be no set of {length} faces; try a length of 1 to {MOST:,}")
        if look not in LOOKS:
            raise UserError(f"look {look!r} is not known; try one of {', '.join(LOOKS)}")
        self.length, self.size, self.seed, self.first, self.look = length, size, seed, first, look
        # Picture and labels are drawn from one portrait, so we keep the latest one.
        self._latest: tuple[int, np.ndarray] | None = None
        self._kept: dict[tuple, torch.Tensor] = {}
        self._kept_bytes = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        face = self.face(index)
        return {"image": self.image(face), "label": self.label_map(face)}

    def face(self, index: int) -> int:
        if not -self.length <= index < self.length:
            raise IndexError(f"index {index} is outside of {self.length} faces")
        return self.first + index % self.length

    def image(self, shape: int, style: int | Mapping[int, int] | None = None) -> tv_tensors.Image:
        """The picture of `draw` as bytes [3, H, W], drawn once and kept."""
        key = shape, frozenset(style.items()) if isinstance(style, Mapping) else style
        return tv_tensors.Image(self._keep(key, lambda: _bytes(self.draw(shape, style)).permute(2, 0, 1)))

    def label_map(self, shape: int) -> tv_tensors.Mask:
        """The labels of `label` as bytes [H, W], drawn once and kept."""
        return tv_tensors.Mask(self._keep((shape,), lambda: _bytes(self.label(shape))))

    def draw(self, shape: int, style: int | Mapping[int, int] | None = None) -> Image.Image:
        """Draw the shape of one face in the style of another: the ground truth of a style transfer.

        `style` is the number of the face whose styles are used. Or it gives a face for some regions; the other regions
        keep their own style.
        """
        return paint(self._cells(shape), self._styles(shape, style), self.size)

    def label(self, shape: int) -> Image.Image:
        """Draw the labels of a face: each pixel has the region at its middle."""
        fine = supersampling(self.size)
        return Image.fromarray(self._cells(shape)[fine // 2 :: fine, fine // 2 :: fine] // len(Tone))

    def _cells(self, shape: int) -> np.ndarray:
        if self._latest is None or self._latest[0] != shape:
            cells = draw_portrait(seed_for("shape", self.seed, shape), self.size * supersampling(self.size))
            self._latest = shape, cells
        return self._latest[1]

    def _styles(self, shape: int, style: int | Mapping[int, int] | None) -> list[Style]:
        if not isinstance(style, Mapping):
            style = dict.fromkeys(Region, shape if style is None else style)
        return [LOOKS[self.look](self.seed, style.get(region, shape), region) for region in Region]

    def _keep(self, key: tuple, draw: Callable[[], torch.Tensor]) -> torch.Tensor:
        kept = self._kept.get(key)
        if kept is None:
            kept = draw().contiguous()
            if self._kept_bytes + kept.numel() <= MEMORY:
                self._kept[key] = kept
                self._kept_bytes += kept.numel()
        return kept.clone()  # the caller may write on it


class FaceTransfers(Dataset):
    """Pairs of faces for style transfer: A, B, and the truth, which is A's shape drawn in B's styles.

    B is the face after A; after the last face comes the first. "region_truth" is A with the style of one "region" from
    B. This region is one that both faces have and that fills 1/64 of A or more; pairs take these regions in turn.
    """

    def __init__(self, faces: Faces) -> None:
        if len(faces) < 2:
            raise UserError("a style transfer needs two faces; try Faces of length 2 or more")
        self.faces = faces
        self.num_labels, self.label_names, self.flip_pairs = faces.num_labels, faces.label_names, faces.flip_pairs

    def __len__(self) -> int:
        return len(self.faces)

    def __getitem__(self, index: int) -> dict[str, Any]:
        faces = self.faces
        a, b = faces.face(index), faces.face((index + 1) % len(self))
        item = {"image": faces.image(a), "label": faces.label_map(a), "truth": faces.image(a, style=b)}
        item |= {"style_image": faces.image(b), "style_label": faces.label_map(b)}
        parts = item["label"], item["style_label"]
        sizes, theirs = (torch.bincount(part.flatten(), minlength=self.num_labels) for part in parts)
        shared = ((sizes * 64 >= parts[0].numel()) & (theirs > 0)).nonzero().flatten().tolist()
        region = shared[index % len(shared)]
        return item | {"region": region, "region_truth": faces.image(a, style={region: b})}


class FaceDomains(Dataset):
    """Two unpaired domains: "a" has posters of the even faces, "b" has neon pictures of the odd faces.

    With `truth`, there are also perfect translations: "truth_b" is the face of "a" in neon, and "truth_a" is the face
    of "b" as a poster.
    """

    def __init__(self, length: int, size: int = 64, seed: int = 0, first: int = 0, truth: bool = False) -> None:
        self.posters = Faces(2 * length, size, seed, 2 * first, look="poster")
        self.neons = Faces(2 * length, size, seed, 2 * first, look="neon")
        self.length, self.truth = length, truth

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        even = self.posters.face(2 * index)
        item: dict[str, torch.Tensor] = {"a": self.posters.image(even), "b": self.neons.image(even + 1)}
        if self.truth:
            item |= {"truth_b": self.neons.image(even), "truth_a": self.posters.image(even + 1)}
        return item


class FaceLooks(Dataset):
    """Faces with classes, which take turns: posters and neon pictures."""

    looks = ("poster", "neon")

    def __init__(self, length: int, size: int = 64, seed: int = 0, first: int = 0) -> None:
        self.faces, self.neons = (Faces(length, size, seed, first, look) for look in self.looks)

    def __len__(self) -> int:
        return len(self.faces)

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self.faces.face(index)
        neon = number % 2
        return {"image": (self.neons if neon else self.faces).image(number), "class": neon}


def _bytes(picture: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(picture))
