"""Pairs in files: what is read, in every layout, and every way to get it wrong."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import tv_tensors

from datasets import FolderPairs
from datasets.files.pairs import Column, Pairs, as_size, edge_map, read_map, read_picture
from gan.errors import UserError
from tests.support.layouts import LAYOUTS, colours, folder, labels, put

STORED = [name for name in LAYOUTS if name != "celebamask"]  # whose label maps are there, not made


@pytest.fixture(params=LAYOUTS)
def written(request, tmp_path):
    """A good data set in each layout."""
    return LAYOUTS[request.param](tmp_path / "set")


@pytest.fixture(params=STORED)
def stored(request, tmp_path):
    return LAYOUTS[request.param](tmp_path / "set")


def middles(to, of):
    """Where the middle of each of `to` pixels lies among `of`."""
    return ((np.arange(to) + 0.5) * of / to).astype(int)


# Every layout.


def test_items_are_the_files(written):
    data = written.open()
    assert [data.paths(k)[:2] for k in range(len(data))] == list(zip(written.pictures, written.labels, strict=True))
    for k, path in enumerate(written.labels):
        item = data[k]
        assert isinstance(item["image"], tv_tensors.Image) and isinstance(item["label"], tv_tensors.Mask)
        assert item["image"].dtype == item["label"].dtype == torch.uint8
        assert item["image"].shape == (3, *data.size) and item["label"].shape == data.size
        assert item["image"].is_contiguous() and item["label"].max() < data.num_labels == len(data.label_names)
        values = read_map(path)
        expected = values[middles(8, values.shape[0])][:, middles(data.size[1], values.shape[1])].astype(int)
        for value, label in data.void.items():
            expected[expected == value] = label
        assert (item["label"].numpy() == expected).all(), "the value in the middle of each pixel"
    assert all(0 <= label < data.num_labels for pair in data.flip_pairs for label in pair)
    with pytest.raises(IndexError):
        data[len(data)]
    assert torch.equal(data[-1]["image"], data[len(data) - 1]["image"])


def test_splits_share_nothing_and_are_of_one_kind(written):
    train, val = (written.open(split=split) for split in ("train", "val"))
    paths = [{data.paths(k)[0] for k in range(len(data))} for data in (train, val)]
    assert paths[0] and paths[1] and not paths[0] & paths[1]
    for name in ("num_labels", "label_names", "flip_pairs"):
        assert getattr(train, name) == getattr(val, name)
    with pytest.raises(UserError, match="split 'tests' is not known; try one of train, val"):
        written.open(split="tests")


def test_size_is_height_and_width(written):
    item = written.open(size=(6, 10))[0]
    assert item["image"].shape == (3, 6, 10) and item["label"].shape == (6, 10)
    with pytest.raises(UserError, match="size 0x10 has no pixels"):
        written.open(size=(0, 10))
    assert as_size(7) == (7, 7)


def test_a_second_start_reads_no_picture(written, monkeypatch):
    first = written.open()
    monkeypatch.setattr(Pairs, "_check", lambda *_: pytest.fail("read again"))
    again = written.open()
    assert [again.paths(k) for k in range(len(again))] == [first.paths(k) for k in range(len(first))]


CACHES = {
    "folder": "1c2286a2",
    "prepared": "67b9b09d",
    "ade20k": "1fb78fb5",
    "cityscapes": "11c4b3f8",
    "coco": "899d066b",
    "facades": "a8c430d1",
    "celebamask": "f49ce74d",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_cache_has_the_name_that_older_versions_gave_it(layout, tmp_path):
    """Another name would make every user read a whole data set again."""
    LAYOUTS[layout](tmp_path).open()
    assert [path.name for path in tmp_path.rglob("checked-*.npz")] == [f"checked-{CACHES[layout]}.npz"]


def test_worker_processes_share_one_array(written):
    data = written.open()
    assert not [name for name, value in vars(data).items() if isinstance(value, list | dict)]
    assert data._files.dtype.kind == "S"
    assert torch.equal(pickle.loads(pickle.dumps(data))[0]["image"], data[0]["image"])
    alone = [item["image"] for item in data]
    helped = DataLoader(data, batch_size=None, num_workers=1)
    assert all(torch.equal(item["image"], image) for item, image in zip(helped, alone, strict=True))


def test_grey_pictures_become_rgb(written):
    values = Image.open(written.pictures[1]).convert("L")
    put(written.pictures[1], values)
    image = written.open()[1]["image"]
    assert image.shape[0] == 3 and torch.equal(image[0], image[1]) and torch.equal(image[0], image[2])


def test_suffixes_in_capitals(stored):
    for paths, suffix in ((stored.pictures, ".JPG"), (stored.labels, ".PNG")):
        paths[1].rename(paths[1].with_suffix(suffix if paths[1].suffix == ".jpg" else ".PNG"))
    data = stored.open()
    assert len(data) == len(stored.pictures) and data.paths(1)[1].suffix == ".PNG"
    assert data[1]["label"].shape == data.size


def test_sub_folders(stored):
    data = stored.open()
    expected = data[0]
    for path in (stored.pictures[0], *data.paths(0)[1:]):
        (path.parent / "0").mkdir(exist_ok=True)
        path.rename(path.parent / "0" / path.name)
    data = stored.open()
    (place,) = (k for k in range(len(data)) if data.paths(k)[0].name == stored.pictures[0].name)
    assert data.paths(place)[0].parent.name == "0"
    assert torch.equal(data[place]["image"], expected["image"]) and torch.equal(data[place]["label"], expected["label"])


# Every fault, in every layout in which it can be.


def test_a_label_map_that_is_missing(stored):
    stored.labels[1].unlink()
    with pytest.raises(UserError) as error:
        stored.open()
    assert f"pictures have no label map of the same name: {stored.pictures[1]}; add each label map to" in str(
        error.value
    )


def test_a_picture_that_is_missing(written):
    written.pictures[1].unlink()
    with pytest.raises(UserError, match=r"1 of \d+ (label maps have no picture|pictures are missing)"):
        written.open()


def test_a_truncated_picture_is_found_at_start(written):
    put(written.pictures[1], colours(64, 64))
    whole = written.pictures[1].read_bytes()
    written.pictures[1].write_bytes(whole[: len(whole) * 9 // 10])
    with pytest.raises(UserError) as error:
        written.open()
    assert f"{written.pictures[1]} cannot be read as a picture" in str(error.value)


def test_a_label_of_255(stored):
    values = read_map(stored.labels[1])
    values[-1, -1] = 255
    put(stored.labels[1], values)
    data = stored.open
    if "255 for" in stored.allowed:
        assert data(size=values.shape)[1]["label"][-1, -1] == int(stored.allowed.split("255 for ")[1])
        values[-1, -1] = 254
        put(stored.labels[1], values)
    with pytest.raises(UserError) as error:
        data()
    assert str(error.value) == f"{stored.labels[1]} has the label {values[-1, -1]}; {stored.allowed}"


def test_palette_label_maps_are_read_by_number(stored):
    expected = stored.open()[1]["label"]
    picture = Image.fromarray(read_map(stored.labels[1]).astype(np.uint8))
    picture.putpalette(np.random.default_rng(3).integers(0, 256, 768).astype(np.uint8).tolist())
    put(stored.labels[1], picture)
    assert Image.open(stored.labels[1]).mode == "P"
    assert torch.equal(stored.open()[1]["label"], expected)


def test_sixteen_bit_label_maps_are_read_by_number(stored):
    expected = stored.open()[1]["label"]
    put(stored.labels[1], Image.fromarray(read_map(stored.labels[1]).astype(np.uint16)))
    assert Image.open(stored.labels[1]).mode == "I;16"
    assert torch.equal(stored.open()[1]["label"], expected)


def test_a_pair_of_two_shapes(stored):
    values = read_map(stored.labels[1])
    put(stored.labels[1], values[:, :-1])
    height, width = values.shape
    with pytest.raises(UserError) as error:
        stored.open()
    message = f"{stored.pictures[1]} is {width}x{height} and {stored.labels[1]} is {width - 1}x{height}; make them the"
    assert str(error.value).startswith(message)


# Reading.


def one_pair(root, picture, label=None, **options):
    """A folder of one pair."""
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


def test_a_kind_of_picture_is_known_by_its_bytes(tmp_path):
    path = put(tmp_path / "a.png", colours())
    path.rename(tmp_path / "a.jpg")
    assert (read_picture(tmp_path / "a.jpg").permute(1, 2, 0).numpy() == colours()).all()


def test_pictures_are_resized_as_pillow_does_to_a_shade(tmp_path):
    smooth = Image.fromarray(colours(12, 9).astype(np.uint8)).resize((90, 120), Image.Resampling.BICUBIC)
    path = one_pair(tmp_path, smooth, labels(120, 90))
    image = FolderPairs(path, 4, (30, 33))[0]["image"].permute(1, 2, 0).numpy().astype(int)
    assert np.abs(image - np.array(smooth.resize((33, 30), Image.Resampling.BICUBIC))).max() <= 1


def test_resizing_never_mixes_labels(tmp_path):
    data = FolderPairs(one_pair(tmp_path, colours(30, 20), labels(30, 20, top=2) * 200), 256, 13)
    assert set(data[0]["label"].unique().tolist()) == {0, 200}


def test_label_maps_may_be_half_as_large_as_pictures(tmp_path):
    item = FolderPairs(one_pair(tmp_path, colours(16, 16), labels(8, 8)), 4, 8)[0]
    assert (item["label"].numpy() == labels(8, 8)).all()
    put(tmp_path / "labels" / "a.png", labels(8, 4))
    with pytest.raises(UserError, match=r"16x16 and .* is 4x8"):
        FolderPairs(tmp_path, 4, 8)


def test_orientation_is_ignored_as_labels_have_none(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    for suffix in ("png", "jpg"):
        path = put(tmp_path / f"a.{suffix}", colours(8, 12), exif=exif)
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


def test_a_file_that_goes_bad_later_is_named(tmp_path):
    data = FolderPairs(one_pair(tmp_path, colours()), 4, 8)
    put(tmp_path / "labels" / "a.png", np.full((8, 8), 9))
    with pytest.raises(UserError, match=r"a\.png has the label 9; with 4 labels"):
        data[0]
    for path in data.paths(0):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match=rf"{path} cannot be read as a picture .*; replace or remove it"):
            data[0]
        path.write_bytes(whole)


# Parts of a pair.


def test_a_cut_is_a_part_of_what_was_resized(tmp_path):
    data = FolderPairs(one_pair(tmp_path, colours(40, 60), labels(40, 60)), 4, (16, 24))
    larger = FolderPairs(tmp_path, 4, (20, 30))[0]
    cut = data.load_crop(0, (20, 30), (3, 5))
    for name in ("image", "label"):
        assert torch.equal(cut[name], larger[name][..., 3:19, 5:29])


class Instances(Pairs):
    """Three kinds of files."""

    num_labels, label_names = 4, ("0", "1", "2", "3")

    def __init__(self, root, size):
        columns = (Column("picture", ("images",)), Column("label map", ("labels",)), Column("instance map", ("ids",)))
        super().__init__(root, columns, size)


def test_edges_lie_between_instances():
    ids = np.zeros((5, 6), np.int32)
    ids[1:3, 2:4] = 70000
    expected = ["001100", "011110", "011110", "001100", "000000"]
    assert ["".join(map(str, row)) for row in edge_map(ids)] == expected
    assert edge_map(np.full((3, 3), 7)).sum() == 0
    assert edge_map(np.array([[1]])).tolist() == [[0]]


def test_edges_are_made_of_what_is_seen(tmp_path):
    ids = np.repeat(np.repeat(np.arange(36).reshape(6, 6) * 1000, 4, 0), 4, 1).astype(np.uint16)
    one_pair(tmp_path, colours(24, 24), labels(24, 24))
    put(tmp_path / "ids" / "a.png", Image.fromarray(ids))
    data = Instances(tmp_path, 12)
    assert len(data.paths(0)) == 3 and data[0]["edges"].dtype == torch.uint8
    assert (data[0]["edges"].numpy() == edge_map(ids[1::2, 1::2])).all(), "of the resized instances"
    cut = data.load_crop(0, (24, 24), (4, 8))["edges"].numpy()
    assert (cut == edge_map(ids[4:16, 8:20])).all()
    assert not cut[1:3, 0].any(), "a border of the part is no edge, though its neighbour outside is another"


def test_instances_that_are_missing_or_of_another_shape(tmp_path):
    one_pair(tmp_path, colours(), labels())
    put(tmp_path / "ids" / "b.png", labels())
    with pytest.raises(UserError, match=r"1 of 1 pictures have no instance map of the same name: .*a\.png; add each"):
        Instances(tmp_path, 8)
    put(tmp_path / "ids" / "a.png", labels(8, 7))
    with pytest.raises(UserError, match=r"is 8x8 and .*ids.a\.png is 7x8"):
        Instances(tmp_path, 8)
    put(tmp_path / "ids" / "a.png", colours())
    with pytest.raises(UserError, match=r"ids.a\.png is a picture of mode RGB"):
        Instances(tmp_path, 8)


# All that is wrong is said together.


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


def test_a_picture_in_two_folders_has_two_names(tmp_path):
    for place in ("one", "two"):
        put(tmp_path / place / "a.jpg", colours())
        put(tmp_path / place / "a.png", labels())

    class Two(Pairs):
        num_labels, label_names = 4, ("0", "1", "2", "3")

    where = ("one", "two")
    data = Two(tmp_path, (Column("picture", where, suffixes=(".jpg",)), Column("label map", where)), 8)
    assert [data.paths(k)[0].parent.name for k in range(2)] == ["one", "two"]


def test_too_many_problems_end_the_search(tmp_path):
    for k in range(130):
        put(tmp_path / "images" / f"{k:03d}.png", colours(2, 2))
        put(tmp_path / "labels" / f"{k:03d}.png", np.full((2, 2), 9))
    with pytest.raises(UserError, match=r"^100 problems \(and no more looked for\) in "):
        FolderPairs(tmp_path, 4, 8)
