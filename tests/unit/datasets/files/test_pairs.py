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
from tests.support.layouts import colours, folder, hollow_png, labels, put
from tests.support.posix import not_on_windows, where_case_counts


def one_pair(root, picture, label=None, **options):
    put(root / "images" / "a.png", picture, **options)
    put(root / "labels" / "a.png", labels() if label is None else label)
    return root


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


def test_a_picture_of_sixteen_bits_is_refused(tmp_path):
    one_pair(tmp_path, Image.fromarray(np.full((8, 8), 40000, np.uint16)))
    with pytest.raises(UserError, match=r"a\.png has more than 8 bits a channel \(mode I;16\); save it with 8"):
        FolderPairs(tmp_path, 4, 8)


def test_more_labels_than_a_byte_holds(tmp_path):
    values = labels(top=1000)
    one_pair(tmp_path, colours(), Image.fromarray(values.astype(np.uint16)))
    label = FolderPairs(tmp_path, 1000, 8)[0]["label"]
    assert label.dtype == torch.int32 and (label.numpy() == values).all()
    with pytest.raises(UserError, match=r"the label \d\d\d; with 256 labels"):
        FolderPairs(tmp_path, 256, 8)


@pytest.fixture
def open_set(tmp_path):
    """A data set of three kinds of files, split, and the files of its first sample."""
    for name in ("a", "b"):
        for folder_name, values in (("images", colours()), ("labels", labels()), ("ids", labels())):
            put(tmp_path / folder_name / f"{name}.png", values)
    data = Instances(tmp_path, 8)
    data.keep_only(slice(1, None))
    return data, data.paths(0)


@pytest.mark.promise(
    "a file of the data changes, vanishes or becomes wrong while a run trains",
    "the run ends with its name and what has changed, also from a loader's worker",
)
@pytest.mark.parametrize("which", range(3))
def test_a_file_that_changes_while_its_set_is_open_is_named(which, open_set):
    data, paths = open_set
    whole, time = paths[which].read_bytes(), paths[which].stat().st_mtime_ns
    put(paths[which], colours(seed=7) if which == 0 else labels(seed=7))
    os.utime(paths[which], ns=(time, time + 1))
    with pytest.raises(UserError, match=rf"^{paths[which]} has changed since the data set was opened: it ") as error:
        data[0]
    assert "put the old one back, or type --resume auto to go on with what it is now" in str(error.value)
    paths[which].write_bytes(whole + b" ")
    size = len(whole)
    with pytest.raises(UserError, match=rf"it had {size:,} bytes, and has {size + 1:,}"):
        data[0]
    paths[which].write_bytes(whole)
    with pytest.raises(UserError, match=r"it was written again at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"):
        data[0]
    os.utime(paths[which], ns=(time, time))
    assert data[0].keys() == {"image", "label", "edges"}


@not_on_windows
@pytest.mark.parametrize("which", range(3))
def test_a_file_that_is_gone_or_cannot_be_read_any_more_is_named(which, open_set):
    data, paths = open_set
    whole, time = paths[which].read_bytes(), paths[which].stat().st_mtime_ns
    paths[which].unlink()
    with pytest.raises(UserError, match=rf"^there is no {paths[which]} any more; put it back$"):
        data[0]
    os.mkfifo(paths[which])
    with pytest.raises(UserError, match=rf"{paths[which]} cannot be read as a picture \(it is a named pipe, and no f"):
        data[0]
    paths[which].unlink()
    damaged = bytearray(whole)
    damaged[50:60] = bytes(10)
    paths[which].write_bytes(damaged)
    os.utime(paths[which], ns=(time, time))
    with pytest.raises(UserError, match=rf"^{paths[which]} cannot be read as a picture \(.*\); replace or remove it$"):
        data[0]


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


NO_PICTURES = {
    "nothing": (b"", "it is none of JPEG, PNG"),
    "text": (b"<html>", "it is none of JPEG, PNG"),
    "no pixels": (hollow_png(8, 8), "truncated|broken|not enough"),
    "a bomb": (hollow_png(100_000, 100_000), r"it has more than 178,956,970 pixels, the most that is read; make"),
    "a program of PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n", "it is none of"),
    "half a header": (hollow_png(8, 8)[:20], "it is none of|cannot be|Truncated|unpack"),
}


@pytest.mark.promise("links that loop, names that differ in case, pictures that are none")
@pytest.mark.parametrize("what", NO_PICTURES)
@pytest.mark.parametrize("place", ["images", "labels"])
def test_a_file_that_is_no_picture_is_named(what, place, tmp_path):
    content, message = NO_PICTURES[what]
    one_pair(tmp_path, colours())
    (tmp_path / place / "a.png").write_bytes(content)
    where = f"^{tmp_path}/{place}/a.png cannot be read as a picture"
    with pytest.raises(UserError, match=rf"{where} \(.*({message}).*\); replace.*$"):
        FolderPairs(tmp_path, 4, 8)


@pytest.mark.promise("a named pipe, a device, a socket or a folder in place of a file")
@not_on_windows
def test_what_is_no_file_is_named_and_not_waited_for(tmp_path):
    one_pair(tmp_path, colours())
    picture = tmp_path / "images" / "a.png"
    for make, message in (
        (lambda: os.mkfifo(picture), r"a.png cannot be read as a picture \(it is a named pipe, and no file\)"),
        (lambda: picture.symlink_to("/dev/zero"), r"a.png cannot be read as a picture \(it is a device, and no file\)"),
        (picture.mkdir, "1 of 1 label maps have no picture|there are no pictures"),
        (lambda: picture.symlink_to(picture), r"a.png cannot be read \(Too many levels of symbolic links\)"),
        (lambda: picture.symlink_to("nowhere"), r"a.png cannot be read \(No such file or directory\)"),
    ):
        picture.rmdir() if picture.is_dir() else picture.unlink()
        make()
        with pytest.raises(UserError, match=message):
            FolderPairs(tmp_path, 4, 8)


@pytest.mark.promise("links that loop, names that differ in case, pictures that are none")
@where_case_counts
def test_capital_letters_in_names_count(tmp_path):
    one_pair(tmp_path, colours())
    (tmp_path / "images" / "a.png").rename(tmp_path / "images" / "A.png")
    with pytest.raises(UserError, match=r"no label map of the same name: .*/A.png; capital letters count too; add"):
        FolderPairs(tmp_path, 4, 8)


class Four(Pairs):
    num_labels, label_names = 4, ("0", "1", "2", "3")


class Instances(Four):
    def __init__(self, root, size):
        columns = (Column("picture", ("images",)), Column("label map", ("labels",)), Column("instance map", ("ids",)))
        super().__init__(root, columns, size)


def edges(ids):
    return edges_of(torch.from_numpy(ids.astype(np.int32))).byte().numpy()


def test_edges_lie_between_instances():
    ids = np.zeros((5, 6), np.int32)
    ids[1:3, 2:4] = 70000
    expected = ["001100", "011110", "011110", "001100", "000000"]
    assert ["".join(map(str, row)) for row in edges(ids)] == expected
    assert edges(np.full((3, 3), 7)).sum() == 0
    assert edges(np.array([[1]])).tolist() == [[0]]


def test_instances_that_are_missing_or_of_another_shape(tmp_path):
    one_pair(tmp_path, colours(), labels())
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
