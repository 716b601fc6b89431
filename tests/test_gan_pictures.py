"""Grids of samples."""

import torch
from PIL import Image

from gan import pictures


def test_a_picture_is_what_the_tensor_says():
    sample = torch.tensor([[[-1.0, 1.0]], [[0.0, 3.0]], [[1.0, -3.0]]])
    picture = pictures.picture(sample)
    assert picture.size == (2, 1)
    assert picture.getpixel((0, 0)) == (0, 128, 255)
    assert picture.getpixel((1, 0)) == (255, 255, 0)
    assert pictures.picture(torch.zeros(1, 2, 2)).getpixel((0, 0)) == (128, 128, 128)


def test_labels_keep_their_colour_whatever_else_is_in_the_map():
    table = pictures.palette(19)
    one = pictures.picture(torch.tensor([[3, 5]])).getpixel((0, 0))
    other = pictures.picture(torch.tensor([[18, 3]])).getpixel((1, 0))
    assert one == other == tuple(table[3].tolist())


def test_colours_of_labels_can_be_told_apart():
    table = pictures.palette(40).int()
    distances = (table[:, None] - table[None]).abs().sum(2) + 1000 * torch.eye(40, dtype=torch.int)
    assert distances.min() > 15
    assert torch.equal(pictures.palette(10).int(), table[:10])


def test_a_grid_has_a_titled_column_a_batch_and_a_row_a_sample():
    red, green = torch.tensor([1.0, -1, -1]), torch.tensor([-1.0, 1, -1])
    columns = {"one": red.view(1, 3, 1, 1).expand(5, 3, 16, 16), "two": green.view(1, 3, 1, 1).expand(5, 3, 16, 16)}
    sheet = pictures.grid(columns, rows=3)
    cell = 128 + pictures.MARGIN
    assert sheet.size == (pictures.MARGIN + 2 * cell, pictures.TITLE + pictures.MARGIN + 3 * cell)
    for row in range(3):
        y = pictures.TITLE + row * cell + 64
        assert sheet.getpixel((pictures.MARGIN + 64, y)) == (255, 0, 0)
        assert sheet.getpixel((pictures.MARGIN + cell + 64, y)) == (0, 255, 0)
    titles = sheet.crop((0, 0, sheet.width, pictures.TITLE)).convert("L")
    assert titles.getextrema()[0] < 100  # there is writing


def test_large_pictures_are_not_enlarged():
    assert pictures.grid({"x": torch.zeros(1, 3, 200, 200)}).width == 200 + 2 * pictures.MARGIN


def test_saving_replaces_a_picture_as_a_whole(tmp_path):
    path = tmp_path / "x.png"
    for colour in ("red", "blue"):
        pictures.save(Image.new("RGB", (4, 4), colour), path)
    assert [each.name for each in tmp_path.iterdir()] == ["x.png"]
    with Image.open(path) as image:
        assert image.getpixel((0, 0)) == (0, 0, 255)
