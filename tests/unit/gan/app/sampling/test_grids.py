"""Grids of pictures and of sounds."""

import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont

from gan.app.sampling import grids
from gan.files.disk import write_whole
from gan.sound import Sound


def test_a_picture_is_what_the_tensor_says():
    sample = torch.tensor([[[-1.0, 1.0]], [[0.0, 3.0]], [[1.0, -3.0]]])
    picture = grids.picture(sample)
    assert picture.size == (2, 1)
    assert picture.getpixel((0, 0)) == (0, 128, 255)
    assert picture.getpixel((1, 0)) == (255, 255, 0)
    assert grids.picture(torch.zeros(1, 2, 2)).getpixel((0, 0)) == (128, 128, 128)
    sample = torch.tensor([[[1.0, 1.0]], [[-1.0, -1.0]], [[-1.0, -1.0]], [[1.0, -1.0]]])
    picture = grids.picture(sample)  # what is transparent is shown on gray
    assert picture.getpixel((0, 0)) == (255, 0, 0)
    assert picture.getpixel((1, 0)) == (178, 178, 178)


def test_colours_of_labels_can_be_told_apart_and_stay_whatever_else_is_in_the_map():
    table = grids.palette(19)
    one = grids.picture(torch.tensor([[3, 5]])).getpixel((0, 0))
    other = grids.picture(torch.tensor([[18, 3]])).getpixel((1, 0))
    assert one == other == tuple(table[3].tolist())
    table = grids.palette(40).int()
    distances = (table[:, None] - table[None]).abs().sum(2) + 1000 * torch.eye(40, dtype=torch.int)
    assert distances.min() > 15
    assert torch.equal(grids.palette(10).int(), table[:10])


def test_wide_pictures_of_a_row_stand_below_each_other():
    def colour(red: float) -> torch.Tensor:
        return torch.tensor([red, -1.0, -1.0]).view(3, 1, 1).expand(3, 20, 100)

    columns = {"one": [colour(0.0), colour(0.2)], "two": [colour(0.4), None]}
    sheet = grids.grid(columns)
    assert sheet.height == grids.TITLE + grids.MARGIN + 4 * (20 + grids.MARGIN)
    reds = [sheet.getpixel((sheet.width - 50, grids.TITLE + line * 26 + 10)) for line in range(4)]
    assert reds == [(128, 0, 0), (178, 0, 0), (153, 0, 0), (255, 255, 255)]
    titled = grids.grid(columns, titles=["first", "second"])
    assert titled.height == sheet.height and titled.width > sheet.width
    narrow = {title: [column[0][:, :, :40]] for title, column in columns.items()}
    assert grids.grid(narrow).width == grids.MARGIN + 2 * (3 * 40 + grids.MARGIN)


def test_saving_replaces_a_picture_as_a_whole_and_large_ones_are_not_enlarged(tmp_path):
    path = tmp_path / "x.png"
    for colour in ("red", "blue"):
        write_whole(path, grids.png(Image.new("RGB", (4, 4), colour)))
    assert [each.name for each in tmp_path.iterdir()] == ["x.png"]
    with Image.open(path) as image:
        assert image.getpixel((0, 0)) == (0, 0, 255)
    assert grids.grid({"x": torch.zeros(1, 3, 200, 200)}).width == 200 + 2 * grids.MARGIN
    for (height, width), size in (((600, 700), (700, 600)), ((19, 16), (16 * 32, 19 * 32))):
        assert grids.label_png(torch.zeros(height, width, dtype=torch.int64), 2).size == size


def test_a_grid_has_titled_columns_and_rows_and_cells_may_be_missing():
    red = torch.tensor([1.0, -1, -1]).view(3, 1, 1).expand(3, 128, 128)
    columns = {"one": [None, red], "two": [red, None]}
    plain, titled = grids.grid(columns), grids.grid(columns, titles=["first", "the second row"])
    cell = 128 + grids.MARGIN
    assert plain.size == (grids.MARGIN + 2 * cell, grids.TITLE + grids.MARGIN + 2 * cell)
    assert titled.height == plain.height == grids.grid(columns, rows=1).height + cell
    assert plain.crop((0, 0, plain.width, grids.TITLE)).convert("L").getextrema()[0] < 100  # there is writing
    shift = titled.width - plain.width
    assert 40 < shift <= 128 + grids.MARGIN
    assert titled.crop((shift, 0, titled.width, titled.height)).tobytes() == plain.tobytes()
    white, colour = (255, 255, 255), (255, 0, 0)
    found = [plain.getpixel((x, y)) for x in (70, 70 + cell) for y in (80, 200)]
    assert found == [white, colour, colour, white]
    for row in range(2):  # each title stands beside its row
        middle = grids.TITLE + row * 134 + 64
        assert titled.crop((0, middle - 10, shift, middle + 10)).convert("L").getextrema()[0] < 100


def test_long_titles_are_shortened_in_their_middle():
    name, font = "a name that is much longer than its picture is wide", ImageFont.load_default(size=14)
    assert grids._fit("short", font, 128) == "short"
    short = grids._fit(name, font, 128)
    assert short.startswith("a name") and short.endswith("wide") and "…" in short
    assert font.getlength(short) <= 128
    sheet = grids.grid(dict.fromkeys((name, "b"), torch.zeros(1, 3, 128, 128)))
    assert sheet.crop((134, 0, 140, grids.TITLE)).convert("L").getextrema()[0] == 255  # stays in its column


@pytest.mark.parametrize("labels", [1, 19, 183, 256])
def test_colours_tell_the_labels_exactly(labels):
    label = torch.randint(labels, (9, 7), generator=torch.Generator().manual_seed(0))
    colours = grids.palette(labels)[label]
    assert torch.equal(grids.unpaint(colours, labels), label)
    colours[2, 3] = torch.tensor([255, 255, 255])
    assert (grids.unpaint(colours, labels) < 0).nonzero().tolist() == [[2, 3]]
    assert grids.unpaint(grids.palette(labels + 1)[labels:].unsqueeze(0), labels).tolist() == [[-1]]


# ---- sounds ----


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


def test_letters_beyond_ascii_are_drawn():
    picture = Image.new("RGB", (64, 64))
    assert grids.titled(picture, "ö").tobytes() != grids.titled(picture, "Ж").tobytes()  # as boxes they are alike
