"""Cityscapes: its ids, its cities in order, and edges of its instances."""

import numpy as np
import pytest
import torch

from datasets import Cityscapes
from datasets.files.pairs import edge_map, read_map
from gan.files.errors import UserError
from tests.support.layouts import cityscapes, put


def test_ids_are_the_published_ones_and_the_licence_plate_comes_last():
    assert Cityscapes.num_labels == 35 == len(set(Cityscapes.label_names))
    for number, name in {0: "unlabeled", 7: "road", 23: "sky", 26: "car", 33: "bicycle", 34: "license plate"}.items():
        assert Cityscapes.label_names[number] == name


def test_edges_are_those_of_the_instances(tmp_path):
    written = cityscapes(tmp_path)
    data = written.open()
    assert [path.name.split("_")[-1] for path in data.paths(0)] == [
        "leftImg8bit.png",
        "labelIds.png",
        "instanceIds.png",
    ]
    for k in range(len(data)):
        ids = read_map(data.paths(k)[2])
        assert ids.max() > 255 and (data[k]["edges"].numpy() == edge_map(ids)).all()
    plain = written.open(edges=False)
    assert set(plain[0]) == {"image", "label"} and torch.equal(plain[0]["label"], data[0]["label"])


def test_it_is_twice_as_wide_as_high_unless_said_otherwise(tmp_path):
    cityscapes(tmp_path)
    item = Cityscapes(tmp_path)[0]
    assert item["image"].shape == (3, 256, 512) and item["label"].shape == item["edges"].shape == (256, 512)


def test_instances_that_are_missing(tmp_path):
    written = cityscapes(tmp_path)
    instances = str(written.labels[1]).replace("labelIds", "instanceIds")
    put(written.labels[1].parent / "spare.png", np.zeros((8, 16)))
    (written.labels[1].parent / instances).unlink()
    with pytest.raises(UserError, match=r"1 of 3 pictures have no instance map of the same name: .*000001_000019_left"):
        written.open()
    assert len(written.open(edges=False)) == 3


def test_the_test_set_has_no_labels(tmp_path):
    with pytest.raises(UserError, match="split 'test' is not known; try one of train, val"):
        Cityscapes(tmp_path, "test")
