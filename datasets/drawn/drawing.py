"""What every part of a portrait is drawn with: regions and tones, the plan of a face, curves, and a pen."""

from collections.abc import Sequence
from enum import IntEnum
from math import cos, pi, sin
from random import Random
from typing import TypeVar

import numpy as np
from PIL import Image, ImageDraw

T = TypeVar("T")
Points = Sequence[tuple[float, float]] | np.ndarray

Region = IntEnum(
    "Region",
    "BACKGROUND SKIN NOSE EYE_G L_EYE R_EYE L_BROW R_BROW L_EAR R_EAR"
    " MOUTH U_LIP L_LIP HAIR HAT EAR_R NECK_L NECK CLOTH",
    start=0,
)

LABELS: tuple[str, ...] = tuple(region.name.lower() for region in Region)

# A mirrored picture shows a left eye where the right one was.
FLIP_PAIRS = tuple((int(Region[f"L_{part}"]), int(Region[f"R_{part}"])) for part in ("EYE", "BROW", "EAR"))

Tone = IntEnum("Tone", "PLAIN SOFT SHADOW DEEP DARK INK BLUSH GLOW LIGHT SHINE WHITE", start=0)

# How a tone changes a colour: factors for red, green and blue, then a share of white.
TONES: dict[Tone, tuple[float, float, float, float]] = {
    Tone.PLAIN: (1, 1, 1, 0),
    Tone.SOFT: (0.94, 0.93, 0.94, 0),
    Tone.SHADOW: (0.86, 0.84, 0.87, 0),
    Tone.DEEP: (0.70, 0.67, 0.71, 0),
    Tone.DARK: (0.45, 0.42, 0.46, 0),
    Tone.INK: (0.17, 0.15, 0.19, 0),
    Tone.BLUSH: (1.0, 0.89, 0.89, 0),
    Tone.GLOW: (1, 1, 1, 0.16),
    Tone.LIGHT: (1, 1, 1, 0.24),
    Tone.SHINE: (1, 1, 1, 0.5),
    Tone.WHITE: (1, 1, 1, 0.93),
}

SHORT = ("bald", "ring", "buzz", "parted", "quiff", "spiky", "fringe", "curly", "afro")
TIED = ("bun", "tail", "pigtails")
LONG = ("long", "wavy", "bob")


class Plan:
    """Chooses a face from one seed. The order of the calls matters: each takes the next random number."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

        self.side = self.pick(-1, 1)  # where the parting, the shadow and other one-sided things are
        self.width = self.between(0.70, 0.84)  # half the width of the head
        self.jaw = self.between(0.74, 0.92)  # the width at the jaw, as a part of that
        self.turn = self.between(-0.10, 0.10)
        self.size = self.between(0.285, 0.325)
        self.x, self.y = self.between(0.47, 0.53), self.between(0.455, 0.49)
        self.eye_x = self.width * self.between(0.43, 0.50)
        self.eye_y = self.between(-0.02, 0.08)
        self.hair = self.pick(*SHORT, *TIED, *LONG)
        self.ears_hidden = self.hair in LONG
        self.hat = self.pick("beanie", "cap", "brim", "beret") if self.chance(0.22) else None
        self.glasses = self.pick("round", "square", "cat", "sun") if self.chance(0.28) else None

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self._random()

    def chance(self, share: float) -> bool:
        """True for this share of all faces."""
        return self._random() < share

    def pick(self, *choices: T) -> T:
        return choices[int(self._random() * len(choices))]


# Catmull and Rom 1974, a cubic through its points: a row for each position in a piece, a column for each point.
_T = np.arange(6) / 6
_SPLINE = (
    np.stack([-_T + 2 * _T**2 - _T**3, 2 - 5 * _T**2 + 3 * _T**3, _T + 4 * _T**2 - 3 * _T**3, _T**3 - _T**2], 1) / 2
)
_FOUR = np.arange(4)
_ANGLES = np.arange(28) * 2 * pi / 28
_CIRCLE = np.stack([np.cos(_ANGLES), np.sin(_ANGLES)], 1)


def smooth(points: Points) -> np.ndarray:
    """The closed round curve through the points."""
    points = np.asarray(points, float)
    whole = np.concatenate([points[-1:], points, points[:2]])
    return _through(whole)


def arc(points: Points) -> np.ndarray:
    """The open round curve through the points."""
    points = np.asarray(points, float)
    first, last = 2 * points[:1] - points[1:2], 2 * points[-1:] - points[-2:-1]
    return np.concatenate([_through(np.concatenate([first, points, last])), points[-1:]])


def _through(whole: np.ndarray) -> np.ndarray:
    around = whole[np.arange(len(whole) - 3)[:, None] + _FOUR]
    return (_SPLINE @ around).reshape(-1, 2)


def oval(x: float, y: float, across: float, down: float) -> np.ndarray:
    """An ellipse with this centre and these radii."""
    return _CIRCLE * (across, down) + (x, y)


def ribbon(points: Points, *widths: float) -> np.ndarray:
    """A stroke along the round curve through the points, whose width changes along `widths`."""
    line = arc(points)
    along = np.empty_like(line)
    along[1:-1], along[0], along[-1] = line[2:] - line[:-2], line[1] - line[0], line[-1] - line[-2]
    aside = along[:, ::-1] * (-1, 1) / np.sqrt((along**2).sum(1, keepdims=True))
    places = np.arange(len(line)) * (len(widths) - 1) / (len(line) - 1)
    half = np.interp(places, np.arange(len(widths)), widths)[:, None] / 2
    return np.concatenate([line + aside * half, (line - aside * half)[::-1]])


def mirrored(half: Points) -> np.ndarray:
    """A symmetric outline, from its right half from top to bottom."""
    half = np.asarray(half, float)
    return np.concatenate([half, (half * (-1, 1))[::-1]])


class Canvas:
    """Two drawings of the same size: the region of every point, and the tone of one region there.

    A tone is stored with its region and shows on no other region, so a shadow ends exactly where its region ends. But
    do not draw a tone far beyond its region: it overwrites the tones of the neighbours.
    """

    def __init__(self, side: int) -> None:
        self.side = side
        self.regions, self.tones = Image.new("L", (side, side)), Image.new("L", (side, side))

    def cells(self) -> np.ndarray:
        """Region * len(Tone) + tone of every point, as bytes."""
        regions, tones = np.asarray(self.regions), np.asarray(self.tones)
        return _MEET.take(regions.astype(np.uint16) << 8 | tones)


# [region, drawn tone] -> cell. A tone of another region becomes the plain tone.
_TONES = len(Tone)
_REGION, _DRAWN = np.arange(len(Region))[:, None], np.arange(256)
_MEET = np.where(_DRAWN // _TONES == _REGION, _DRAWN, _REGION * _TONES).astype(np.uint8)


class Pen:
    """Draws on a canvas with its own origin, scale and rotation, as fractions of the canvas."""

    def __init__(self, canvas: Canvas, x: float, y: float, scale: float, turn: float = 0.0) -> None:
        self._regions, self._tones = ImageDraw.Draw(canvas.regions), ImageDraw.Draw(canvas.tones)
        self._matrix = np.array([[cos(turn), sin(turn)], [-sin(turn), cos(turn)]]) * scale * canvas.side
        # Pillow counts from the middle of the first pixel, we count from its corner.
        self._origin = np.array([x, y]) * canvas.side - 0.5

    def fill(self, region: Region, outline: Points, tone: Tone = Tone.PLAIN) -> None:
        """Make the inside of the outline part of the region, in one tone."""
        corners = self._corners(outline)
        self._regions.polygon(corners, fill=int(region))
        self._tones.polygon(corners, fill=region * _TONES + tone)

    def tone(self, region: Region, tone: Tone, outline: Points) -> None:
        """Give a tone to the part of the region inside the outline."""
        self._tones.polygon(self._corners(outline), fill=region * _TONES + tone)

    def _corners(self, outline: Points) -> list[float]:
        return (outline @ self._matrix + self._origin).ravel().tolist()
