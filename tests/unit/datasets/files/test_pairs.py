"""Pairs in files: how they are read, edges of instances, and what is said of many problems."""

import os
import traceback

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import FolderPairs, GlobalLoader
from datasets.files.pairs import Column, Pairs, read_picture
from gan.files.errors import UserError, refuse
from nets.blocks import edges_of
from tests.support.layouts import colours, folder, hollow_png, labels, pairs, put
from tests.support.posix import not_on_windows


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "P", "LA", "1"])
@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_every_kind_of_picture_becomes_rgb_as_pillow_has_it(tmp_path, mode, suffix):
    picture = Image.fromarray(colours(20, 30).astype(np.uint8)).convert(mode)
    try:
        path = put(tmp_path / f"a.{suffix}", picture)
    except OSError:
        pytest.skip(f"{suffix} has no {mode}")
    with Image.open(path) as opened:
        expected = np.array(opened.convert("RGB"))
    assert (read_picture(path).permute(1, 2, 0).numpy() == expected).all()


def test_a_picture_is_known_by_its_bytes_and_its_orientation_is_ignored_as_labels_have_none(tmp_path):
    path = put(tmp_path / "a.png", colours())
    path.rename(tmp_path / "a.jpg")
    assert (read_picture(tmp_path / "a.jpg").permute(1, 2, 0).numpy() == colours()).all()
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    for suffix in ("png", "jpg"):
        path = put(tmp_path / f"b.{suffix}", colours(8, 12), exif=exif)
        assert read_picture(path).shape == (3, 8, 12)


@pytest.fixture
def open_set(tmp_path):
    """A data set, split, and the files of its first sample."""
    for name in "ab":
        put(pairs(tmp_path, name) / "ids" / f"{name}.png", labels())
    data = Instances(tmp_path, 8)
    data.keep_only(slice(1, None))
    return data, data.paths(0)


@pytest.mark.promise(
    "a file of the data changes, vanishes or becomes wrong while a run trains",
    "the run ends with its name and what has changed, also from a loader's worker",
)
@pytest.mark.parametrize("which", range(3))
def test_a_file_that_changes_is_damaged_or_gone_while_its_set_is_open_is_named(which, open_set):
    data, paths = open_set
    path = paths[which]
    whole, time = path.read_bytes(), path.stat().st_mtime_ns
    later = (
        r"it was written again at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d; put the old one back, or type --resume auto to go on"
    )

    def found(words, content=whole, at=time):
        path.write_bytes(content)
        os.utime(path, ns=(time, at))
        with pytest.raises(UserError, match=f"^{path} {words}"):
            data[0]

    found(f"has changed since the data set was opened: {later} with what it is now$", at=time + 1)
    found(f"has .*: it had {len(whole):,} bytes, and has {len(whole) + 1:,}", content=whole + b" ")
    found(r"cannot be read as a picture \(.*\); replace or remove it$", content=whole[:50] + bytes(10) + whole[60:])
    path.unlink()
    with pytest.raises(UserError, match=rf"^there is no {path} any more; put it back$"):
        data[0]
    path.write_bytes(whole)
    os.utime(path, ns=(time, time))
    assert data[0].keys() == {"image", "label", "edges"}


@pytest.mark.promise("a file of the data changes, vanishes or becomes wrong while a run trains")
def test_a_worker_names_the_file_too(open_set, capsys):
    data, paths = open_set
    paths[0].write_bytes(b"")
    with pytest.raises(UserError) as error:
        list(GlobalLoader(data, 1, shuffle=False, workers=1))
    traceback.clear_frames(error.tb)  # else torch waits five seconds when its iterator is collected later
    refuse(error.value)
    said = capsys.readouterr().err
    assert said.startswith(f"error: {paths[0]} has changed since") and said.count("\n") == 1


class Instances(Pairs):
    """A data set of three kinds of files."""

    num_labels, label_names = 4, ("0", "1", "2", "3")

    def __init__(self, root, size):
        columns = (Column("picture", ("images",)), Column("label map", ("labels",)), Column("instance map", ("ids",)))
        super().__init__(root, columns, size)


NONE, NO_FILE = r"a\.png cannot be read as a picture \(.*({}).*\); replace", r"a\.png cannot be read \({}"
NO_PICTURES = {
    "nothing": (lambda path: path.touch(), NONE.format("it is none of JPEG, PNG")),
    "text": (lambda path: path.write_bytes(b"<html>"), NONE.format("it is none of JPEG, PNG")),
    "no pixels": (lambda path: path.write_bytes(hollow_png(8, 8)), NONE.format("truncated|broken|not enough")),
    "a bomb": (
        lambda path: path.write_bytes(hollow_png(100_000, 100_000)),
        NONE.format("more than 178,956,970 pixels, the most that is read; make"),
    ),
    "a program of PostScript": (
        lambda path: path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"),
        NONE.format("it is none of"),
    ),
    "half a header": (
        lambda path: path.write_bytes(hollow_png(8, 8)[:20]),
        NONE.format("it is none of|cannot be|Truncated|unpack"),
    ),
}
NO_FILES = {
    "a pipe": (os.mkfifo, NONE.format("it is a named pipe, and no file")),
    "a device": (lambda path: path.symlink_to("/dev/zero"), NONE.format("it is a device, and no file")),
    "a folder": (lambda path: path.mkdir(), "there are no (pictures|label maps)|s have no (picture|label map)"),
    "a loop": (lambda path: path.symlink_to(path), NO_FILE.format("Too many levels of symbolic links")),
    "a link to nowhere": (lambda path: path.symlink_to("nowhere"), NO_FILE.format("No such file or directory")),
}


def refused_in_place_of_a_picture(make, words, place, root):
    path = pairs(root, "a") / place / "a.png"
    path.unlink()
    make(path)
    with pytest.raises(UserError, match=words):
        FolderPairs(root, 4, 8)


@pytest.mark.promise("links that loop, names that differ in case, pictures that are none")
@pytest.mark.parametrize("place", ["images", "labels"])
@pytest.mark.parametrize("what", NO_PICTURES)
def test_a_file_that_is_no_picture_is_named(what, place, tmp_path):
    refused_in_place_of_a_picture(*NO_PICTURES[what], place, tmp_path)


@pytest.mark.promise("a named pipe, a device, a socket or a folder in place of a file")
@not_on_windows
@pytest.mark.parametrize("place", ["images", "labels"])
@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file_is_named_and_not_waited_for(what, place, tmp_path):
    refused_in_place_of_a_picture(*NO_FILES[what], place, tmp_path)


def test_edges_lie_between_instances():
    ids = torch.zeros(5, 6, dtype=torch.int32)
    ids[1:3, 2:4] = 70000
    expected = ["001100", "011110", "011110", "001100", "000000"]
    assert ["".join(map(str, row)) for row in edges_of(ids).byte().tolist()] == expected
    assert not edges_of(torch.full((3, 3), 7)).any() and not edges_of(torch.ones(1, 1)).any()


def test_instances_that_are_missing_or_of_another_shape(tmp_path):
    pairs(tmp_path, "a")
    for name, values, message in (
        ("b", labels(), r"1 of 1 pictures have no instance map of the same name: .*a\.png; add each"),
        ("a", labels(8, 7), r"is 8x8 and .*ids.a\.png is 7x8"),
        ("a", colours(), r"ids.a\.png is a picture of mode RGB"),
    ):
        put(tmp_path / "ids" / f"{name}.png", values)
        with pytest.raises(UserError, match=message):
            Instances(tmp_path, 8)


@pytest.mark.promise("a data set with wrong files")
def test_all_problems_are_listed_at_once(tmp_path):
    written = folder(tmp_path)
    for k in range(9):
        put(tmp_path / "images" / f"bad{k}.png", colours())
        put(tmp_path / "labels" / f"bad{k}.png", np.full((8, 8), 40 + k))
    put(written.labels[0], labels(8, 7))
    written.pictures[1].write_text("no picture")
    with pytest.raises(UserError) as error:
        written.open()
    lines = str(error.value).splitlines()
    assert lines[0] == f"11 problems in {tmp_path}:" and lines[-1].strip() == "... and 6 more"
    assert "images/a.jpg is 8x8 and" in lines[1] and "b.jpg cannot be read" in lines[2]
    assert "bad0.png has the label 40" in lines[3] and len(lines) == 7


def test_missing_files_of_both_kinds_are_listed_at_once(tmp_path):
    written = folder(tmp_path)
    for k in range(5):
        put(tmp_path / "images" / f"lonely{k}.png", colours())
    written.pictures[0].unlink()
    put(tmp_path / "images" / "b.png", colours())
    with pytest.raises(UserError) as error:
        written.open()
    lines = str(error.value).splitlines()
    assert lines[0] == f"3 problems in {tmp_path}:"
    assert lines[1].strip().startswith(f"{tmp_path}/images/b.jpg and {tmp_path}/images/b.png have the same name")
    assert "5 of 7 pictures have no label map of the same name" in lines[2] and "lonely2.png ...;" in lines[2]
    assert "1 of 3 label maps have no picture of the same name" in lines[3]


def test_too_many_problems_end_the_search(tmp_path):
    for k in range(130):
        put(tmp_path / "images" / f"{k:03d}.png", colours(2, 2))
        put(tmp_path / "labels" / f"{k:03d}.png", np.full((2, 2), 9))
    with pytest.raises(UserError, match=r"^100 problems \(and no more looked for\) in "):
        FolderPairs(tmp_path, 4, 8)
