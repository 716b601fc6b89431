"""Grids of pictures. Those of sounds: tests/system/test_sounds.py."""

import pytest
import torch

from gan.app.sampling import grids


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


def test_a_grid_has_titled_columns_and_rows_and_cells_may_be_missing():
    red = torch.tensor([1.0, -1, -1]).view(3, 1, 1).expand(3, 128, 128)
    columns = {"one": [None, red], "two": [red, None]}
    plain, titled = grids.grid(columns), grids.grid(columns, titles=["first", "the second row"])
    cell = 128 + grids.MARGIN
    assert plain.size == (grids.MARGIN + 2 * cell, grids.TITLE + grids.MARGIN + 2 * cell)
    assert titled.height == plain.height == grids.grid(columns, rows=1).height + cell
    shift = titled.width - plain.width
    assert titled.crop((shift, 0, titled.width, titled.height)).tobytes() == plain.tobytes()
    white, colour = (255, 255, 255), (255, 0, 0)
    found = [plain.getpixel((x, y)) for x in (70, 70 + cell) for y in (80, 200)]
    assert found == [white, colour, colour, white]
    beside = [(0, grids.TITLE + row * 134 + 54, shift, grids.TITLE + row * 134 + 74) for row in range(2)]
    for place in ((shift, 0, titled.width, grids.TITLE), *beside):
        assert titled.crop(place).convert("L").getextrema()[0] < 100, "there is writing"


@pytest.mark.parametrize("labels", [1, 19, 183, 256])
def test_colours_tell_the_labels_exactly(labels):
    label = torch.randint(labels, (9, 7), generator=torch.Generator().manual_seed(0))
    colours = grids.palette(labels)[label]
    assert torch.equal(grids.unpaint(colours, labels), label)
    colours[2, 3] = torch.tensor([255, 255, 255])
    assert (grids.unpaint(colours, labels) < 0).nonzero().tolist() == [[2, 3]]
    assert grids.unpaint(grids.palette(labels + 1)[labels:].unsqueeze(0), labels).tolist() == [[-1]]
