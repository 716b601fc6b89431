"""What sounds look like, and their files."""

import math

import numpy as np
import torch

from gan.app.page.table import sample_cell
from gan.app.painting import grids
from gan.sound import Sound

RATE = 8000


def sine(hertz: float, loudness: float = 1.0, seconds: float = 0.5) -> Sound:
    time = torch.arange(int(seconds * RATE)) / RATE
    return Sound(loudness * torch.sin(2 * math.pi * hertz * time), RATE)


def brightness(sound: Sound) -> np.ndarray:
    return np.asarray(grids.picture(sound).convert("L"), np.float64)


def test_pitch_goes_up_and_time_to_the_right():
    rows = [brightness(sine(hertz)).mean(1).argmax() for hertz in (200, 800, 3200)]
    assert rows == sorted(rows, reverse=True) and rows[0] - rows[2] > 40
    late = Sound(torch.cat([torch.zeros(4000), sine(800).samples]), RATE)
    picture = brightness(late)
    assert picture[:, :50].max() + 100 < picture[:, 75:].max()
    assert picture.shape == (grids.BANDS * grids.ZOOM, 8000 // 64)


def test_loud_is_bright():
    means = [brightness(sine(800, loudness)).mean() for loudness in (0.001, 0.1, 1.0)]
    assert means == sorted(means) and means[2] > 2 * means[0]


def test_only_columns_of_sounds_become_files(tmp_path):
    columns = {"real": sine(200)[None], "picture": torch.zeros(1, 3, 4, 4)}
    assert grids.save_sounds(columns, tmp_path / "step-1.png") == [tmp_path / "step-1-real.wav"]
    assert (tmp_path / "step-1-real.wav").read_bytes() == columns["real"].wav()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_cell_has_the_picture_and_the_file():
    cell = sample_cell(sine(200))
    assert cell.wav == sine(200).wav() and cell.pictures[0].size == grids.picture(sine(200)).size
    assert sample_cell(torch.zeros(3, 4, 4)).wav == b""
