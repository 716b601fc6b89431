"""Pictures of every mode, shape and packing: how they are fitted, and that they are decoded once."""

import io
import json
import os

import numpy as np
import pytest
from PIL import Image

from datasets.files import cache
from datasets.files import pictures as module
from datasets.files.decoding import Frame
from datasets.files.find import find_source
from datasets.files.pictures import Headers, Pictures
from datasets.files.sources import class_folders
from gan.files.errors import UserError
from gan.runs.pictures import OnPictures
from tests.unit.datasets.files.test_hostile import in_a_tar


def plain(mode, colour, size=(8, 8)):
    return Image.new(mode, size, colour)


def palette(transparent):
    picture = Image.new("P", (8, 8), 1)
    picture.putpalette([0, 0, 0, 200, 100, 50])
    picture.info |= {"transparency": 1} if transparent else {}
    return picture


@pytest.mark.parametrize(
    ("picture", "channels", "background", "wanted"),
    [
        (plain("RGB", (200, 100, 50)), 3, "white", (200, 100, 50)),
        (plain("RGB", (200, 100, 50)), 4, "white", (200, 100, 50, 255)),
        (plain("RGB", (100, 100, 100)), 1, "white", (100,)),
        (plain("RGBA", (200, 100, 50, 0)), 3, "white", (255, 255, 255)),
        (plain("RGBA", (200, 100, 0, 51)), 3, "black", (40, 20, 0)),
        (plain("RGBA", (200, 100, 0, 51)), 4, "black", (200, 100, 0, 51)),
        (plain("LA", (100, 0)), 1, "white", (255,)),
        (plain("1", 1), 3, "white", (255, 255, 255)),
        (plain("CMYK", (0, 255, 255, 0)), 3, "white", (255, 0, 0)),
        (plain("I;16", 65535), 1, "white", (255,)),
        (plain("I;16", 257 * 100), 3, "white", (100, 100, 100)),
        (plain("F", 1.0), 1, "white", (255,)),
        (palette(False), 3, "white", (200, 100, 50)),
        (palette(True), 3, "black", (0, 0, 0)),
    ],
    ids=lambda value: getattr(value, "mode", None),
)
@pytest.mark.parametrize("side", [8, 4])
def test_every_mode_becomes_the_wanted_channels(picture, channels, background, wanted, side):
    pixels = Frame(side, side, channels, "crop", background).pixels(picture)
    assert pixels.shape == (channels, side, side)
    assert (pixels.permute(1, 2, 0).reshape(-1, channels).numpy() == wanted).all()


RED, LIME = (255, 0, 0), (0, 255, 0)


def halves():
    """Red left of green, twice as wide as high."""
    picture = Image.new("RGB", (32, 16), RED)
    picture.paste(LIME, (16, 0, 32, 16))
    return picture


@pytest.mark.parametrize(
    ("fit", "corners"), [("crop", (RED, LIME)), ("stretch", (RED, LIME)), ("pad", ((0, 0, 255), (0, 0, 255)))]
)
def test_a_picture_of_another_shape_is_fitted(fit, corners):
    pixels = Frame(8, 8, 3, fit, "blue").pixels(halves()).permute(1, 2, 0).numpy().astype(int)
    assert np.abs(pixels[0, [0, -1]] - corners).max() <= 16  # bicubic rings at the edge
    assert pixels[4, 1, 0] > 200 and pixels[4, 6, 1] > 200


def test_transparent_colours_do_not_stain_the_edges():
    picture = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    picture.paste((255, 255, 255, 255), (0, 0, 7, 16))
    pixels = Frame(4, 4, 4, "crop", "white").pixels(picture)
    assert (pixels[:3][:, pixels[3] > 0] >= 250).all()


def test_values_beyond_16_bits_are_refused():
    with pytest.raises(UserError, match="its values are not 0 to 65535"):
        Frame(8, 8).pixels(plain("I", 70_000))


def test_a_photograph_stands_as_the_camera_was_held(tmp_path):
    turned = Image.Exif()
    turned[0x0112] = 6
    halves().save(tmp_path / "a.png", exif=turned)
    headers = Headers(find_source(str(tmp_path)))
    assert headers.size() == ((32, 16), "all are")
    pixels = Pictures(headers.source, Frame(32, 16))[0]["image"]
    assert pixels[0, :16].min() == 255 and pixels[1, 16:].min() == 255


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ([(40, 30)] * 3 + [(9, 9)], (30, 40)),
        ([(70, 90), (100, 140), (300, 200), (30, 20)], (64, 64)),
        ([(1400, 1300)] * 3, (256, 256)),
    ],
)
def test_the_size_is_what_fits_most(tmp_path, sizes, wanted):
    for number, size in enumerate(sizes):
        plain("L", 9, size).save(tmp_path / f"{number}.png")
    headers = Headers(find_source(str(tmp_path)))
    assert headers.size()[0] == wanted and headers.channels == 1


def written(root, numbers):
    root.mkdir(exist_ok=True)
    for number in numbers:
        plain("RGB", (number, 0, 0)).save(root / f"{number:03}.png")
    return root


def opened_set(path, **how):
    return Pictures(find_source(str(path)), Frame(8, 8), **how)


def reds(pictures):
    return [int(pictures[row]["image"][0, 0, 0]) for row in range(len(pictures))]


def test_pictures_are_decoded_once_and_new_ones_alone_later(tmp_path, monkeypatch):
    path, decoded = written(tmp_path / "set", range(10, 16)), []
    real = Frame.pixels
    monkeypatch.setattr(Frame, "pixels", lambda frame, picture: decoded.append(picture) or real(frame, picture))

    def opened():
        decoded.clear()
        return opened_set(path)

    first = opened()
    assert (reds(first), len(decoded)) == ([*range(10, 16)], 6)
    assert (reds(opened()), len(decoded)) == ([*range(10, 16)], 0)
    written(path, [3, 20])
    plain("RGB", (99, 0, 0)).save(path / "012.png")
    os.utime(path / "012.png", (1, 1))
    assert (reds(opened()), len(decoded)) == ([3, 10, 11, 99, 13, 14, 15, 20], 3)
    assert reds(first) == [*range(10, 16)], "who had opened the set before sees what it saw"
    first.file.unlink()
    assert (reds(opened()), len(decoded)) == ([3, 10, 11, 99, 13, 14, 15, 20], 8)


def kill(path, red, monkeypatch):
    """Opens a set, and is killed when the picture of that red is decoded."""
    real = Frame.pixels

    def pixels(frame, picture):
        if picture.getpixel((0, 0))[0] == red:
            raise KeyboardInterrupt
        return real(frame, picture)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Frame, "pixels", pixels)
        opened_set(path)


def test_work_that_is_killed_leaves_nothing_half(tmp_path, monkeypatch):
    path = written(tmp_path / "set", range(6))
    kill(path, 4, monkeypatch)
    pictures = opened_set(path)
    assert reds(pictures) == [*range(6)]
    assert pictures.file.stat().st_size == 12 * pictures.bytes, "workers of the killed process may still write its rows"


def test_rows_that_are_lost_are_not_taken_for_those_that_a_killed_process_has_begun(tmp_path, monkeypatch):
    path = written(tmp_path / "set", range(1, 7))
    pictures = opened_set(path)
    os.truncate(pictures.file, 4 * pictures.bytes)
    kill(path, 5, monkeypatch)
    assert reds(opened_set(path)) == [*range(1, 7)]


def test_a_row_that_cannot_be_written_is_not_the_pictures_fault(tmp_path, monkeypatch):
    real = Pictures._reserve
    monkeypatch.setattr(Pictures, "_reserve", lambda self, todo: real(self, todo) or self.file.unlink())
    with pytest.raises(UserError, match=r"cannot write to .*gan-cache: No such file or directory; set"):
        opened_set(written(tmp_path / "set", range(6)), skip_broken=True)


def test_a_damaged_row_is_decoded_again_and_written(tmp_path):
    path = written(tmp_path / "set", range(10, 16))
    pictures = opened_set(path)
    whole = pictures.file.read_bytes()
    pictures.file.write_bytes(bytes([whole[0] ^ 0x40]) + whole[1:])
    assert reds(pictures) == [*range(10, 16)]
    assert pictures.file.read_bytes() == whole


def test_a_listing_of_before_that_has_no_checksums_is_taken(tmp_path):
    path = written(tmp_path / "set", range(10, 16))
    listing = opened_set(path).file.with_suffix(".jsonl")
    notes = [json.loads(line[9:]) for line in listing.read_bytes().splitlines() if line]
    before = [cache._signed(json.dumps([*note, row.split()[0]]).encode()) for *note, row in notes]
    listing.write_bytes(b"\n".join(before))
    pictures = opened_set(path)
    assert reds(pictures) == [*range(10, 16)] and pictures.file.stat().st_size == 6 * pictures.bytes


def test_without_room_on_the_disk_pictures_are_decoded_as_needed(tmp_path, monkeypatch):
    path = written(tmp_path / "set", range(6))
    monkeypatch.setattr(module, "MARGIN", 2**60)
    pictures = opened_set(path)
    assert not pictures.decoded and not pictures.file.stat().st_size
    assert reds(pictures) == [*range(6)]
    os.utime(path / "001.png", (1, 1))
    with pytest.raises(UserError, match=r"001\.png: it has changed since the data set was opened"):
        pictures[1]


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        (["train/1.png", "val/2.png"], None),
        (["train/cat/1.png", "val/dog/2.png"], ("cat", "dog")),
        (["cat/1.png", "dog/2.png"], ("cat", "dog")),
    ],
)
def test_splits_are_no_classes(names, classes):
    found = class_folders(names, None)
    assert (found and found[1]) == classes


def test_shards_of_webdataset_have_their_classes(tmp_path):
    root = tmp_path / "shards"
    root.mkdir()
    for shard in range(2):
        files = {}
        for number in (2, 0, 1):
            plain("RGB", (10 * shard + number, 0, 0)).save(stream := io.BytesIO(), "PNG")
            label = {"cls": str(number).encode()} if shard else {"json": json.dumps({"label": number}).encode()}
            content = {"png": stream.getvalue(), **label, "txt": b"a caption"}
            files |= {f"s{number}.{suffix}": each for suffix, each in content.items()}
        in_a_tar(tmp_path, files).rename(root / f"{shard}.tar")
    data = OnPictures(data=str(root), held_out=0.0).find()
    assert data.classes == 3 and data.val.split and len(data.val) == 0
    assert [(int(item["image"][0, 0, 0]), item["class"]) for item in map(data.train.__getitem__, range(6))] == [
        (0, 0), (1, 1), (2, 2), (10, 0), (11, 1), (12, 2)
    ]  # fmt: skip


def test_a_set_of_torchvision_is_known_by_its_folder_or_its_name(here):
    raw = here / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    images = np.arange(5 * 28 * 28, dtype=np.uint8).reshape(5, 28, 28)
    shape = np.array(images.shape, ">i4").tobytes()
    (raw / "train-images-idx3-ubyte").write_bytes(bytes([0, 0, 8, 3]) + shape + images.tobytes())
    (raw / "train-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1]) + shape[:4] + bytes(range(5)))
    for kind in ("images-idx3", "labels-idx1"):
        (raw / f"t10k-{kind}-ubyte").write_bytes((raw / f"train-{kind}-ubyte").read_bytes())
    for data in ("mnist", "data", str(here / "data")):
        found = OnPictures(data=data, held_out=0.0).find()
        assert (found.size, found.channels, found.classes, len(found.train)) == ((28, 28), 1, 10, 5)
        assert np.array_equal(found.train[3]["image"][0], images[3]) and found.train[3]["class"] == 3
