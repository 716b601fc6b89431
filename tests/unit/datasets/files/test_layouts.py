"""What all data sets on disk have in common, and every fault, in every layout."""

import os
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import tv_tensors

from datasets import ADE20K, Cityscapes, CocoStuff, Facades
from datasets.files.cache import cache_folder
from datasets.files.pairs import as_size, read_map
from gan.files.errors import UserError
from nets.blocks import edges_of
from tests.support import layouts
from tests.support.layouts import LAYOUTS, colours, put

STORED = [name for name in LAYOUTS if name != "celebamask"]  # whose label maps are there, not made


@pytest.fixture(params=LAYOUTS)
def written(request, tmp_path):
    return LAYOUTS[request.param](tmp_path / "set")


@pytest.fixture(params=STORED)
def stored(request, tmp_path):
    return LAYOUTS[request.param](tmp_path / "set")


def middles(to, of):
    """Where the middle of each of `to` pixels lies among `of`."""
    return ((np.arange(to) + 0.5) * of / to).astype(int)


def test_items_are_the_files(written):
    data = written.open()
    assert [data.paths(k)[:2] for k in range(len(data))] == list(zip(written.pictures, written.labels, strict=True))
    assert [data.root / os.fsdecode(name) for name in data.sample_names] == written.pictures
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


def test_size_is_height_and_width(tmp_path):
    written = layouts.folder(tmp_path)
    item = written.open(size=(6, 10))[0]
    assert item["image"].shape == (3, 6, 10) and item["label"].shape == (6, 10)
    with pytest.raises(UserError, match="size 0x10 has no pixels"):
        written.open(size=(0, 10))
    assert as_size(7) == (7, 7)


CACHES = ["1c2286a2", "67b9b09d", "1fb78fb5", "11c4b3f8", "899d066b", "a8c430d1", "9fbb4341"]


@pytest.mark.parametrize(("layout", "name"), [*zip(LAYOUTS, CACHES, strict=True)])
def test_the_cache_has_the_name_that_older_versions_gave_it(layout, name, tmp_path):
    """Another name would make every user read a whole data set again."""
    LAYOUTS[layout](tmp_path / "set").open()
    assert [path.name for path in tmp_path.rglob("checked-*.jsonl")] == [f"checked-{name}.jsonl"]


def test_worker_processes_share_one_array(tmp_path):
    data = layouts.folder(tmp_path).open()
    assert not [name for name, value in vars(data).items() if isinstance(value, list | dict)]
    assert data._files.dtype.kind == "S"
    assert torch.equal(pickle.loads(pickle.dumps(data))[0]["image"], data[0]["image"])
    helped = DataLoader(data, batch_size=None, num_workers=1)
    assert all(torch.equal(ours["image"], theirs["image"]) for ours, theirs in zip(data, helped, strict=True))


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


def test_a_label_map_that_is_missing(stored):
    stored.labels[1].unlink()
    with pytest.raises(
        UserError, match=f"have no label map of the same name: {stored.pictures[1]}; add each label map"
    ):
        stored.open()


def test_a_picture_that_is_missing(written):
    written.pictures[1].unlink()
    with pytest.raises(UserError, match=r"1 of \d+ label maps have no picture|jpg is missing; unpack"):
        written.open()


def test_a_truncated_picture_is_found_at_start(written):
    put(written.pictures[1], colours(64, 64))
    whole = written.pictures[1].read_bytes()
    written.pictures[1].write_bytes(whole[: len(whole) * 9 // 10])
    with pytest.raises(UserError, match=f"{written.pictures[1]} cannot be read as a picture"):
        written.open()


def test_a_label_of_255(stored):
    values = read_map(stored.labels[1])
    values[0, 0] = 255  # not in the middle of a pixel of the resized map
    put(stored.labels[1], values)
    if "255 for" in stored.allowed:
        assert stored.open(size=values.shape)[1]["label"][0, 0] == int(stored.allowed.split("255 for ")[1])
        values[0, 0] = 254
        put(stored.labels[1], values)
    with pytest.raises(UserError, match=f"^{stored.labels[1]} has the label {values[0, 0]}; {stored.allowed}$"):
        stored.open()


@pytest.mark.parametrize(("mode", "kind"), [("P", np.uint8), ("I;16", np.uint16)])
def test_label_maps_of_a_palette_or_of_sixteen_bits_are_read_by_number(mode, kind, tmp_path):
    stored = layouts.folder(tmp_path)
    expected = stored.open()[1]["label"]
    picture = Image.fromarray(read_map(stored.labels[1]).astype(kind))
    if mode == "P":
        picture.putpalette(np.random.default_rng(3).integers(0, 256, 768).astype(np.uint8).tolist())
    put(stored.labels[1], picture)
    assert Image.open(stored.labels[1]).mode == mode
    assert torch.equal(stored.open()[1]["label"], expected)


def test_a_pair_of_two_shapes(stored):
    values = read_map(stored.labels[1])
    put(stored.labels[1], values[:, :-1])
    height, width = values.shape
    sizes = f"{stored.pictures[1]} is {width}x{height} and {stored.labels[1]} is {width - 1}x{height}"
    with pytest.raises(UserError, match=f"^{sizes}; make them the"):
        stored.open()


NAMES = {
    ADE20K: (151, {0: "other", 1: "wall", 3: "sky", 13: "person", 21: "car", 93: "apparel", 150: "flag"}),
    Facades: (13, {0: "none", 1: "background", 2: "facade", 3: "window", 12: "shop"}),
    # The published list is that of the numbers plus one: 1 person ... 92 banner ... 182 wood.
    CocoStuff: (
        183,
        {0: "person", 1: "bicycle", 39: "baseball glove", 90: "hair brush", 91: "banner", 93: "branch"}
        | {156: "sky-other", 181: "wood", 182: "void"},
    ),
    # The ids, and the licence plate comes last.
    Cityscapes: (35, {0: "unlabeled", 7: "road", 23: "sky", 26: "car", 33: "bicycle", 34: "license plate"}),
}


@pytest.mark.parametrize("kind", NAMES)
def test_labels_are_numbered_as_published(kind):
    count, names = NAMES[kind]
    assert kind.num_labels == count == len(set(kind.label_names))
    assert {number: kind.label_names[number] for number in names} == names


def test_splits_of_facades_take_turns_through_both_folders(tmp_path):
    written, names = layouts.facades(tmp_path), {}
    for split in ("train", "val", "test"):
        data = written.open(split=split)
        names[split] = [data.paths(k)[0].stem for k in range(len(data))]
    assert names["val"] == ["cmp_b0005", "cmp_x0003"] and names["test"] == ["cmp_b0006", "cmp_x0004"]
    assert names["train"] == [*(f"cmp_b000{k}" for k in (1, 2, 3, 4, 7, 8)), "cmp_x0001", "cmp_x0002"]
    assert len(list(cache_folder(tmp_path).glob("checked-*.jsonl"))) == 1, "one index for all"


@pytest.mark.parametrize(("layout", "size"), [(layouts.coco, (10, 12)), (layouts.cityscapes, (8, 16))])
def test_edges_are_those_of_the_instances(layout, size, tmp_path):
    written = layout(tmp_path)
    data, plain = (written.open(size=size, edges=edges) for edges in (True, False))
    for k in range(len(data)):
        ids = torch.from_numpy(read_map(data.paths(k)[2]).astype(np.int32))
        assert torch.equal(data[k]["edges"].as_subclass(torch.Tensor), edges_of(ids).byte())
    assert set(plain[0]) == {"image", "label"} and torch.equal(plain[0]["label"], data[0]["label"])
    assert len(plain.paths(0)) == 2


def test_cityscapes_has_edges_and_is_twice_as_wide_as_high_unless_said_otherwise(tmp_path):
    written = layouts.cityscapes(tmp_path)
    data, item = written.open(), Cityscapes(tmp_path)[0]
    kinds = ["leftImg8bit.png", "labelIds.png", "instanceIds.png"]
    assert [path.name.split("_")[-1] for path in data.paths(0)] == kinds
    assert read_map(data.paths(0)[2]).max() > 255
    assert item["image"].shape == (3, 256, 512) and item["label"].shape == item["edges"].shape == (256, 512)
    assert "edges" not in layouts.coco(tmp_path).open()[0]
