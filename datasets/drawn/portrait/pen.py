"""Curves, and a pen that draws them."""

from collections.abc import Sequence
from math import cos, pi, sin

import numpy as np
from PIL import Image, ImageDraw

from datasets.drawn.portrait.plan import Region, Tone

Points = Sequence[tuple[float, float]] | np.ndarray

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
    width = (
        np.interp(np.arange(len(line)) * (len(widths) - 1) / (len(line) - 1), np.arange(len(widths)), widths)[:, None]
        / 2
    )
    return np.concatenate([line + aside * width, (line - aside * width)[::-1]])


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

    def fill(self, region: Region, outline: np.ndarray, tone: Tone = Tone.PLAIN) -> None:
        """Make the inside of the outline part of the region, in one tone."""
        corners = self._corners(outline)
        self._regions.polygon(corners, fill=int(region))
        self._tones.polygon(corners, fill=region * _TONES + tone)

    def tone(self, region: Region, tone: Tone, outline: np.ndarray) -> None:
        """Give a tone to the part of the region inside the outline."""
        self._tones.polygon(self._corners(outline), fill=region * _TONES + tone)

    def _corners(self, outline: np.ndarray) -> list[float]:
        return (outline @ self._matrix + self._origin).ravel().tolist()
