"""ADE20K: its names, numbers and folders."""

import torch

from datasets import ADE20K
from tests.support.layouts import ade20k


def test_labels_are_numbered_as_in_the_files():
    assert ADE20K.num_labels == 151 and len(set(ADE20K.label_names)) == 151
    for number, name in {0: "other", 1: "wall", 3: "sky", 13: "person", 21: "car", 93: "apparel", 150: "flag"}.items():
        assert ADE20K.label_names[number] == name


def test_it_opens_from_its_folder_and_from_above(tmp_path):
    written = ade20k(tmp_path)
    above, inside = written.open(), ADE20K(tmp_path / "ADEChallengeData2016", "train", 8)
    assert len(above) == len(inside) == 3 and torch.equal(above[2]["label"], inside[2]["label"])
    val = written.open(split="val")
    assert [path.name for path in val.paths(1)] == ["ADE_val_00000002.jpg", "ADE_val_00000002.png"]
