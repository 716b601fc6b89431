"""Pictures and label maps given by path."""

import os

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import Faces
from gan.app.painting import grids, painter
from gan.files.errors import UserError
from tests.support.posix import not_on_windows

FACES = Faces(2, size=64)
LABELS = FACES.num_labels


def label(size=64):
    return torch.from_numpy(np.array(FACES.label(0).resize((size, size), Image.Resampling.NEAREST))).long()


def read(path, size=(64, 64), labels=LABELS, void=None):
    return painter.read_labels(path, size, labels, void or {})


def test_a_picture_comes_in_the_runs_size_and_range(tmp_path):
    FACES.draw(0).save(tmp_path / "a.png")
    same = painter.read_picture(tmp_path / "a.png", (64, 64))
    assert torch.equal(same, torch.from_numpy(np.array(FACES.draw(0))).permute(2, 0, 1).float() / 127.5 - 1)
    Image.new("L", (40, 20), 255).save(tmp_path / "grey.png")
    assert torch.equal(painter.read_picture(tmp_path / "grey.png", (8, 16)), torch.ones(3, 8, 16))


@pytest.mark.parametrize("mode", ["L", "I;16", "P", "ours", "RGB", "RGBA"])
def test_labels_are_read_as_numbers_or_as_colours(mode, tmp_path):
    path, numbers = tmp_path / "a.png", FACES.label(0)
    if mode == "P":
        numbers.putpalette([k for k in range(256) for _ in range(3)])  # some other palette: the numbers count
    elif mode in ("ours", "RGB", "RGBA"):
        numbers = grids.label_png(label(), LABELS)
        numbers = numbers.convert(mode) if mode != "ours" else numbers
    else:
        numbers = numbers.convert(mode)
    numbers.save(path)
    assert torch.equal(read(path), label())
    assert torch.equal(read(path, (32, 32)), label(32))


def test_an_editor_may_change_the_order_of_a_palette(tmp_path):
    table = grids.palette(LABELS)
    reordered = Image.fromarray((LABELS - 1 - label()).byte().numpy(), "L")
    reordered.putpalette(table.flip(0).flatten().tolist())
    reordered.save(tmp_path / "a.png")
    assert torch.equal(read(tmp_path / "a.png"), label())


def test_the_numbers_that_a_data_set_has_for_void_are_understood(tmp_path):
    Image.fromarray(np.array([[0, 255]], np.uint8)).save(tmp_path / "a.png")
    assert read(tmp_path / "a.png", (1, 2), 4, {255: 3}).tolist() == [[0, 3]]


@pytest.mark.parametrize("value", [19, 255])
def test_a_label_out_of_range_is_refused_by_file_and_value(value, tmp_path):
    numbers = np.array(FACES.label(0))
    numbers[3, 4] = value
    Image.fromarray(numbers).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=rf"a.png has the label {value}; with 19 labels the allowed range is 0..18"):
        read(tmp_path / "a.png", (8, 8))  # also where the resized map would not show it


def test_a_colour_that_is_no_labels_is_refused_by_file_colour_and_place(tmp_path):
    image = grids.label_png(label(), LABELS).convert("RGB")
    image.putpixel((5, 7), (1, 2, 3))
    image.save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"a.png has the colour #010203 at column 5, row 7, and in 1 pixels"):
        read(tmp_path / "a.png")
    FACES.draw(0).save(tmp_path / "b.png")
    with pytest.raises(UserError, match=r"b.png has the colour .* paint without soft edges"):
        read(tmp_path / "b.png")


def test_a_pair_must_show_the_same(tmp_path):
    image, labels = tmp_path / "a.jpg", tmp_path / "a.png"
    FACES.draw(0).resize((128, 128)).save(image)
    FACES.label(0).save(labels)
    picture, numbers = painter.read_pair(image, labels, (32, 32), LABELS, {})
    assert picture.shape == (3, 32, 32) and torch.equal(numbers, label(32))
    FACES.label(0).resize((64, 32)).save(labels)
    with pytest.raises(UserError, match=r"a.jpg is 128x128 and .*a.png is 64x32; .* must be of the same shape"):
        painter.read_pair(image, labels, (32, 32), LABELS, {})


@not_on_windows
def test_files_that_are_not_there_or_no_pictures_are_refused(tmp_path):
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    FACES.label(0).save(good)
    bad.write_bytes(b"\x89PNG nothing")
    pipe = tmp_path / "pipe.png"
    os.mkfifo(pipe)
    for call in (
        lambda path: painter.read_picture(path, (8, 8)),
        lambda path: read(path),
        lambda path: painter.read_pair(path, good, (8, 8), LABELS, {}),
        lambda path: painter.read_pair(good, path, (8, 8), LABELS, {}),
    ):
        with pytest.raises(UserError, match=r"there is no file '.*absent.png'"):
            call(tmp_path / "absent.png")
        with pytest.raises(UserError, match=r"pipe.png cannot be read as a picture \(it is a named pipe"):
            call(pipe)
        with pytest.raises(UserError, match=r"bad.png cannot be read as a picture"):
            call(bad)
