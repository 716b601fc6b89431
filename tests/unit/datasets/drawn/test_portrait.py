"""Curves, tones and textures."""

import numpy as np

from datasets.drawn.drawing import TONES, Canvas, Pen, Region, Tone, arc, mirrored, oval, ribbon, smooth
from datasets.drawn.looks import LEVELS, TEXTURES, texture_levels
from datasets.drawn.portrait import draw_portrait


def test_curves():
    square = [(0, 0), (1, 0), (1, 1), (0, 1)]
    closed, open_ = smooth(square), arc(square)
    for corner in square:
        assert np.isclose(closed, corner).all(1).any() and np.isclose(open_, corner).all(1).any()
    assert np.allclose(open_[0], square[0]) and np.allclose(open_[-1], square[-1])
    assert np.allclose(np.hypot(*oval(0, 0, 2, 2).T), 2)
    both = mirrored([(1, 0), (2, 1)])
    assert np.allclose(both, [(1, 0), (2, 1), (-2, 1), (-1, 0)])
    band = ribbon([(0, 0), (1, 0), (2, 0)], 0.2, 0.4)
    assert np.isclose(np.ptp(band[:, 1]), 0.4) and np.isclose(abs(band[0, 1]), 0.1)


def test_a_tone_shows_on_its_own_region_only():
    canvas = Canvas(20)
    pen = Pen(canvas, 0, 0, 1)
    box = np.array([(0, 0), (0.5, 0), (0.5, 1), (0, 1)])
    pen.fill(Region.SKIN, box)
    pen.tone(Region.SKIN, Tone.DARK, np.array([(0.25, 0), (1, 0), (1, 1), (0.25, 1)]))
    cells = canvas.cells()
    assert cells[10, 2] == Region.SKIN * len(Tone)
    assert cells[10, 7] == Region.SKIN * len(Tone) + Tone.DARK
    assert cells[10, 15] == Region.BACKGROUND * len(Tone), "the dark was meant for the skin"
    pen.fill(Region.HAIR, box, Tone.LIGHT)
    assert canvas.cells()[10, 7] == Region.HAIR * len(Tone) + Tone.LIGHT


def test_cells_fit_into_a_byte():
    assert set(TONES) == set(Tone) and len(Region) * len(Tone) <= 256
    assert draw_portrait(1, 48).max() < len(Region) * len(Tone)


def test_textures_swing_around_the_colour():
    levels = texture_levels(64).reshape(len(TEXTURES), -1).astype(int)
    assert levels.min() >= 0 and levels.max() < LEVELS
    assert (np.abs(levels.mean(1) - LEVELS // 2) < 1.5).all()
    assert (levels[0] == LEVELS // 2).all(), "plain"
    assert len({row.tobytes() for row in levels}) == len(TEXTURES)
