"""Folders of pictures and labels: what is read, and every way to get it wrong."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors

from datasets import FolderPairs
from gan.errors import UserError


def put(path, values, mode=None, **options):
    """Write an array, or a picture, as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = values if isinstance(values, Image.Image) else Image.fromarray(np.asarray(values, np.uint8))
    if mode:
        picture = picture.convert(mode)
    picture.save(path, **options)


def colours(height=8, width=8):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3))


def labels(height=8, width=8, top=4):
    return np.random.default_rng(1).integers(0, top, (height, width))


@pytest.fixture
def root(tmp_path):
    """Two good pairs."""
    for name in ("a", "b"):
        put(tmp_path / "images" / f"{name}.png", colours())
        put(tmp_path / "labels" / f"{name}.png", labels())
    return tmp_path


def test_items_are_those_of_faces(root):
    pairs = FolderPairs(root, num_labels=4, size=8, flip_pairs=((1, 2),))
    item = pairs[0]
    assert len(pairs) == 2 and set(item) == {"image", "label"}
    assert pairs.num_labels == 4 and pairs.label_names == ("0", "1", "2", "3") and pairs.flip_pairs == ((1, 2),)
    assert isinstance(item["image"], tv_tensors.Image) and isinstance(item["label"], tv_tensors.Mask)
    assert item["image"].dtype == item["label"].dtype == torch.uint8
    assert (item["image"].permute(1, 2, 0).numpy() == colours()).all()
    assert (item["label"].numpy() == labels()).all()


def test_pairs_are_sorted_and_may_lie_in_folders(tmp_path):
    for name in ("z/1", "b", "a/2", "a/1"):
        put(tmp_path / "images" / f"{name}.jpg", colours())
        put(tmp_path / "labels" / f"{name}.png", labels())
    pairs = FolderPairs(tmp_path, 4, 8)
    assert [path.relative_to(tmp_path / "labels").as_posix() for _, path in pairs.pairs] == [
        "a/1.png",
        "a/2.png",
        "b.png",
        "z/1.png",
    ]
    assert pairs[3]["image"].shape == (3, 8, 8)


@pytest.mark.parametrize("suffix", ["jpg", "JPEG", "png", "webp", "bmp", "tif"])
def test_kinds_of_pictures(tmp_path, suffix):
    put(tmp_path / "images" / f"a.{suffix}", colours())
    put(tmp_path / "labels" / "a.png", labels())
    (tmp_path / "images" / "notes.txt").write_text("not a picture")
    (tmp_path / "images" / "._a.jpg").write_text("left by a file manager")
    assert FolderPairs(tmp_path, 4, 8)[0]["image"].shape == (3, 8, 8)


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "P"])
def test_every_picture_becomes_rgb(tmp_path, mode):
    put(tmp_path / "images" / ("a.tif" if mode == "CMYK" else "a.png"), colours(), mode=mode)
    put(tmp_path / "labels" / "a.png", labels())
    image = FolderPairs(tmp_path, 4, 8)[0]["image"]
    assert image.shape == (3, 8, 8)
    if mode == "L":
        assert (image[0] == image[1]).all() and (image[0] == image[2]).all()


def test_palette_labels_are_read_by_number(tmp_path):
    put(tmp_path / "images" / "a.png", colours())
    palette = Image.fromarray(labels().astype(np.uint8), "L").copy()
    palette.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200, 9, 9, 9])
    put(tmp_path / "labels" / "a.png", palette)
    assert Image.open(tmp_path / "labels" / "a.png").mode == "P"
    assert (FolderPairs(tmp_path, 4, 8)[0]["label"].numpy() == labels()).all()


def test_sixteen_bit_labels_are_read_by_number(tmp_path):
    put(tmp_path / "images" / "a.png", colours())
    put(tmp_path / "labels" / "a.png", Image.fromarray(labels().astype(np.uint16)))
    assert (FolderPairs(tmp_path, 4, 8)[0]["label"].numpy() == labels()).all()
    put(tmp_path / "labels" / "a.png", Image.fromarray(labels().astype(np.uint16) + 256))
    with pytest.raises(UserError, match=r"the label 25[6-9]"):
        FolderPairs(tmp_path, 4, 8)[0]


def test_resizing_never_mixes_labels(tmp_path):
    put(tmp_path / "images" / "a.png", colours(30, 20))
    put(tmp_path / "labels" / "a.png", labels(30, 20, top=2) * 200)
    item = FolderPairs(tmp_path, 256, 13)[0]
    assert item["image"].shape == (3, 13, 13) and item["label"].shape == (13, 13)
    assert set(item["label"].unique().tolist()) == {0, 200}
    bicubic = Image.fromarray(colours(30, 20).astype(np.uint8)).resize((13, 13), Image.Resampling.BICUBIC)
    assert (item["image"].permute(1, 2, 0).numpy() == np.array(bicubic)).all()


def test_orientation_is_ignored_as_labels_have_none(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    put(tmp_path / "images" / "a.png", colours(8, 12), exif=exif)
    put(tmp_path / "labels" / "a.png", labels(8, 12))
    pairs = FolderPairs(tmp_path, 4, 12)
    upright = Image.fromarray(colours(8, 12).astype(np.uint8)).resize((12, 12), Image.Resampling.BICUBIC)
    assert (pairs[0]["image"].permute(1, 2, 0).numpy() == np.array(upright)).all()


# What is wrong with a folder is said when it is opened.


def test_a_missing_folder(root, tmp_path):
    with pytest.raises(UserError, match=r"there is no folder .*nowhere.images; put the pictures"):
        FolderPairs(tmp_path / "nowhere", 4, 8)
    for path in (root / "labels").iterdir():
        path.unlink()
    (root / "labels").rmdir()
    with pytest.raises(UserError, match=r"there is no folder .*labels; put the label maps \(png\) there"):
        FolderPairs(root, 4, 8)


def test_an_empty_folder(tmp_path):
    (tmp_path / "images").mkdir()
    with pytest.raises(UserError, match=r"there are no pictures .* in .*images"):
        FolderPairs(tmp_path, 4, 8)


def test_labels_that_are_not_png(root):
    for name in ("a", "b"):
        put(root / "labels" / f"{name}.jpg", labels())
        (root / "labels" / f"{name}.png").unlink()
    with pytest.raises(UserError, match=r"there are no label maps \(png\)"):
        FolderPairs(root, 4, 8)


def test_pictures_without_labels(root):
    for k in range(5):
        put(root / "images" / f"lonely{k}.png", colours())
    with pytest.raises(UserError) as error:
        FolderPairs(root, 4, 8)
    message = str(error.value)
    assert message.startswith("5 of 7 files have no label map of the same name: ")
    assert "lonely0.png" in message and "lonely2.png ..." in message and "lonely3" not in message
    assert "add each label map to" in message


def test_labels_without_pictures(root):
    put(root / "labels" / "lonely.png", labels())
    with pytest.raises(UserError, match=r"1 of 3 files have no picture of the same name: .*lonely.png; add each"):
        FolderPairs(root, 4, 8)


def test_two_pictures_of_one_name(root):
    put(root / "images" / "a.jpg", colours())
    with pytest.raises(UserError, match=r"a\.jpg and .*a\.png have the same name; remove one"):
        FolderPairs(root, 4, 8)


@pytest.mark.parametrize("number", [0, -1, 257])
def test_numbers_of_labels_that_no_map_can_hold(root, number):
    with pytest.raises(UserError, match=f"{number} labels do not fit into a byte; try 1 to 256"):
        FolderPairs(root, number, 8)


# What is wrong with a file is said when it is loaded, and the others still load.


@pytest.mark.parametrize("folder", ["images", "labels"])
@pytest.mark.parametrize("damage", ["text", "half", "nothing"])
def test_a_file_that_cannot_be_read(root, folder, damage):
    path = root / folder / "b.png"
    whole = path.read_bytes()
    path.write_bytes({"text": b"this is no picture", "half": whole[: len(whole) // 2], "nothing": b""}[damage])
    pairs = FolderPairs(root, 4, 8)
    pairs[0]
    with pytest.raises(UserError, match=rf"{folder}.b\.png cannot be read as a picture .*; replace or remove it"):
        pairs[1]


def test_a_truncated_jpeg(root):
    put(root / "images" / "c.jpg", colours(64, 64))
    put(root / "labels" / "c.png", labels(64, 64))
    whole = (root / "images" / "c.jpg").read_bytes()
    (root / "images" / "c.jpg").write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(UserError, match=r"c\.jpg cannot be read"):
        FolderPairs(root, 4, 8)[2]


def test_a_pair_of_two_sizes(root):
    put(root / "labels" / "b.png", labels(8, 6))
    with pytest.raises(UserError, match=r"images.b\.png is 8x8 and .*labels.b\.png is 6x8; make a picture"):
        FolderPairs(root, 4, 8)[1]


def test_a_label_out_of_range(root):
    values = labels()
    values[3, 3] = 4
    put(root / "labels" / "b.png", values)
    with pytest.raises(UserError, match=r"b\.png has the label 4; with 4 labels the allowed range is 0\.\.3"):
        FolderPairs(root, 4, 8)[1]
    assert FolderPairs(root, 5, 8)[1]["label"].max() == 4


def test_a_wrong_label_is_seen_even_where_resizing_would_drop_it(root):
    values = labels(64, 64)
    values[0, 0] = 255
    put(root / "images" / "b.png", colours(64, 64))
    put(root / "labels" / "b.png", values)
    with pytest.raises(UserError, match="the label 255"):
        FolderPairs(root, 4, 4)[1]


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA"])
def test_a_label_map_of_colours(root, mode):
    put(root / "labels" / "b.png", labels(), mode=mode)
    with pytest.raises(UserError, match=rf"b\.png is a picture of mode {mode}; a label map has one channel"):
        FolderPairs(root, 4, 8)[1]
