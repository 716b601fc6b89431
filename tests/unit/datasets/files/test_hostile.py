"""Files that are not what they claim to be: each is named, none is run, and the good pictures beside them are kept."""

import io
import json
import os
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets.files.decoding import Frame
from datasets.files.find import find_source
from datasets.files.pictures import Headers, Pictures
from gan.files.errors import UserError
from gan.runs.pictures import OnPictures
from tests.support.layouts import hollow_png

KINDS = {"png": "PNG", "jpg": "JPEG", "gif": "GIF", "bmp": "BMP", "tiff": "TIFF", "webp": "WEBP", "ppm": "PPM"}


def picture(kind="PNG", size=(24, 24)):
    values = np.random.default_rng(0).integers(0, 255, (*size, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, format=kind)
    return stream.getvalue()


DAMAGES = {
    "nothing": lambda whole: b"",
    "text": lambda whole: b"this is no picture\n" * 20,
    "page": lambda whole: b"<!DOCTYPE html><html><body>404</body></html>",
    "pickle": lambda whole: b"cos\nmkdir\n(Vhas-run\ntR.",
    "script": lambda whole: b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(has-run) (w) file closefile\n",
    "byte": lambda whole: whole[:1],
    "head": lambda whole: whole[:16],
    "half": lambda whole: whole[: len(whole) // 2],
    "zeros": lambda whole: bytes(len(whole)),
    "end": lambda whole: whole[len(whole) // 2 :],
}
BROKEN = {
    f"{damage}-{suffix}.{suffix}": spoil(picture(kind))
    for damage, spoil in DAMAGES.items()
    for suffix, kind in KINDS.items()
}
BROKEN |= {
    "huge.png": hollow_png(100_000, 100_000, bytes(10**6)),
    "wide.png": hollow_png(2**31 - 1, 1, bytes(10**6)),
    "tiny.gif": picture("GIF", (1, 1)),
}
GOOD = {f"good/{number}.{suffix}": picture(kind) for number, (suffix, kind) in enumerate(KINDS.items())}


def in_a_folder(root, files):
    for name, content in files.items():
        (root / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "set" / name).write_bytes(content)
    return root / "set"


def in_a_zip(root, files):
    with zipfile.ZipFile(root / "set.zip", "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in files.items():
            file.writestr(name, content)
    return root / "set.zip"


def in_a_tar(root, files):
    with tarfile.open(root / "set.tar", "w", format=tarfile.GNU_FORMAT) as file:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return root / "set.tar"


def in_parquet(root, files):
    rows = [{"bytes": content, "path": name} for name, content in files.items()]
    return parquet(root / "set.parquet", {"image": rows, "label": list(range(len(rows)))})


def parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("packed", [in_a_folder, in_a_zip, in_a_tar, in_parquet])
def test_every_broken_picture_is_named_and_the_good_ones_are_kept(packed, here):
    path = packed(here, {**BROKEN, **GOOD})
    source = find_source(str(path))
    headers = Headers(source)
    assert headers.sizes.keys() <= {(24, 24), (1, 1), (2**31 - 1, 1)}
    with pytest.raises(UserError, match=rf"{len(BROKEN)} of {len(source)} pictures .* --skip-broken") as error:
        Pictures(source, Frame(24, 24))
    assert "... and" in str(error.value)
    tiny = sum(count for size, count in headers.sizes.items() if size != (24, 24))
    dry = f"^{len(headers.problems) + tiny} of "  # nothing is decoded; what a header tells is said at once
    with pytest.raises(UserError, match=dry):
        Pictures(source, Frame(24, 24), keep=False)
    pictures = Pictures(source, Frame(24, 24), skip_broken=True)
    assert len(pictures.problems) == len(BROKEN) and len(pictures) == len(GOOD)
    for problem in pictures.problems:
        assert problem.startswith(str(path)) and len(problem.splitlines()) == 1 and ": " in problem
    if packed is not in_parquet:
        assert {pictures.name(row) for row in range(len(GOOD))} == set(GOOD)
        named = {problem.partition(f"{path}{os.sep}")[2].partition(": ")[0] for problem in pictures.problems}
        assert named == set(BROKEN)
    assert not Path("has-run").exists()


def test_a_picture_that_a_dry_run_cannot_decode_is_said_as_by_a_training(here):
    name = "half-png.png"
    source = find_source(str(in_a_folder(here, {**GOOD, name: BROKEN[name]})))
    pictures = Pictures(source, Frame(24, 24), keep=False)
    with pytest.raises(UserError, match=r"1 of \d+ pictures .* --skip-broken"):
        [pictures[row] for row in range(len(pictures))]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("half.zip", None, "cannot be read as a zip"),
        ("empty.zip", b"", "cannot be read as a zip"),
        ("text.tar", b"this is no tar" * 100, "cannot be read as a tar"),
        ("empty.tar", b"", "cannot be read as a tar"),
        ("a.tgz", b"", "is compressed as a whole; unpack it"),
        ("one.png", b"", "is one picture; give a folder"),
        ("a.txt", b"", "is no kind of data set that is known"),
        ("a.parquet", b"PAR1 this is none PAR1", "cannot be read as Parquet"),
        ("b.parquet", {"label": [1]}, "no column of pictures"),
    ],
)
def test_a_file_that_is_no_data_set_is_named(name, content, message, tmp_path):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    if name == "half.zip":
        content = in_a_zip(tmp_path, GOOD).read_bytes()[:500]
    if isinstance(content, dict):
        parquet(tmp_path / name, content)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        find_source(str(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not {"),
        ("[" * 100_000, "is not {"),
        ('{"labels": [["gone.png", 0], ["a.png", 0]]}', r"names files that are not there: gone.png \(1 in"),
        ('{"labels": []}', "misses: a.png"),
        ('{"labels": [["a.png", -1]]}', "neither whole numbers"),
        ('{"labels": [["a.png", [NaN, 1]]]}', "neither whole numbers"),
    ],
    ids=["text", "nested", "other files", "none", "negative", "no number"],
)
def test_a_dataset_json_that_is_wrong_is_named(text, message, tmp_path):
    path = in_a_zip(tmp_path, {"a.png": picture(), "dataset.json": text.encode()})
    with pytest.raises(UserError, match=message):
        find_source(str(path))
    assert find_source(str(path), classes=False).labels is None


def test_a_dataset_json_that_is_too_large_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.files.sources.MOST_JSON", 10)
    for packed in (in_a_folder, in_a_zip):
        path = packed(tmp_path, {"a.png": picture(), "dataset.json": json.dumps({"labels": None}).encode()})
        with pytest.raises(UserError, match="larger than 10 bytes"):
            find_source(str(path))


@pytest.mark.parametrize("packed", [in_a_folder, in_a_zip, in_a_tar])
def test_a_picture_of_too_many_bytes_is_named_before_it_is_read(packed, tmp_path, monkeypatch):
    path = packed(tmp_path, {"a.png": picture(), "bomb.png": bytes(10**6)})
    monkeypatch.setattr("datasets.files.sources.MOST_BYTES", 10**5)
    with pytest.raises(UserError, match=r"bomb\.png: it has more than"):
        OnPictures(data=str(path)).find()


def test_names_that_lead_out_of_an_archive_write_nothing(tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    for packed in (in_a_zip, in_a_tar):
        path = packed(inner, {f"../{number}.png": picture() for number in range(4)})
        assert len(OnPictures(data=str(path), workers=0).find().train) == 3
    assert {each.name for each in tmp_path.iterdir()} == {"inner"}


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_what_is_no_file_and_names_of_no_text(tmp_path):
    path = in_a_folder(tmp_path, GOOD)
    os.mkfifo(path / "pipe.png")
    (path / "lost.png").symlink_to(path / "gone.png")
    (path / "loop.png").symlink_to(path / "loop.png")
    (path / "zero.png").symlink_to("/dev/zero")
    (path / os.fsdecode(b"\xff\xfe.png")).write_bytes(picture())
    with pytest.raises(UserError, match=r"4 of 12 pictures(?s:.*)pipe\.png: (?s:.*)zero\.png: it is a device"):
        OnPictures(data=str(path)).find()
    assert len(OnPictures(data=str(path), skip_broken=True, held_out=0.0).find().train) == len(GOOD) + 1
    (path / "circle").symlink_to(path)
    with pytest.raises(UserError, match="links to a folder that it is in"):
        OnPictures(data=str(path)).find()


def test_what_is_no_file_in_an_archive_is_not_followed(tmp_path):
    """Links that lead out, devices and pipes: they are no pictures, and the good ones are."""
    kinds = {"SYMTYPE": "/etc/passwd", "LNKTYPE": "../../secret.png", "CHRTYPE": "", "FIFOTYPE": "", "DIRTYPE": ""}
    (tmp_path / "secret.png").write_bytes(picture())
    path = in_a_tar(tmp_path, GOOD)
    with tarfile.open(path, "a") as file:
        for kind, target in kinds.items():
            member = tarfile.TarInfo(f"{kind}.png")
            member.type, member.linkname = getattr(tarfile, kind), target
            file.addfile(member)
    assert len(OnPictures(data=str(path), held_out=0.0, workers=0).find().train) == len(GOOD)


@pytest.mark.parametrize("packed", ["zip", "tar"])
def test_names_of_no_text_in_an_archive_are_names(packed, tmp_path, capsys):
    if packed == "zip":
        path = in_a_zip(tmp_path, {**GOOD, "AAAA.png": picture(), "BBBB.png": b"broken"})
        path.write_bytes(path.read_bytes().replace(b"AAAA", b"\xff\xfe\x1b[").replace(b"BBBB", b"\xc3\x28\x80\n"))
    else:
        path = in_a_tar(tmp_path, {**GOOD, "\udcff\udcfe\x1b[.png": picture(), "\udc80\n.png": b"broken"})
    with pytest.raises(UserError, match=r"1 of 9 pictures") as error:
        OnPictures(data=str(path), held_out=0.0, workers=0).find()
    assert len(str(error.value).splitlines()) == 2, "a new line in a name begins no line"
    found = OnPictures(data=str(path), held_out=0.0, workers=0, skip_broken=True).find()
    assert len(found.train) == len(GOOD) + 1 and "\x1b" not in capsys.readouterr().err


def test_a_bomb_that_hides_its_size_is_named_and_not_unpacked(tmp_path):
    bomb = 10**7
    path = in_a_zip(tmp_path, {**GOOD, "bomb.png": bytes(bomb)})
    path.write_bytes(path.read_bytes().replace(struct.pack("<I", bomb), struct.pack("<I", 100)))
    assert path.stat().st_size < 10**5
    with pytest.raises(UserError, match=r"1 of 8 pictures(?s:.*)bomb\.png: "):
        OnPictures(data=str(path), workers=0).find()
