"""COCO-Stuff: its names and numbers, void, and edges where instances are given."""

import pytest

from datasets import CocoStuff
from datasets.files.pairs import edge_map, read_map
from gan.files.errors import UserError
from tests.support.layouts import coco


def test_labels_are_the_published_numbers_less_one():
    """The published list is that of the numbers plus one: 1 person ... 92 banner ... 182 wood."""
    assert CocoStuff.num_labels == 183 == len(set(CocoStuff.label_names))
    names = {0: "person", 1: "bicycle", 39: "baseball glove", 90: "hair brush", 91: "banner", 93: "branch"}
    for number, name in (names | {156: "sky-other", 181: "wood", 182: "void"}).items():
        assert CocoStuff.label_names[number] == name


def test_pictures_may_lie_where_their_archive_puts_them(tmp_path):
    written = coco(tmp_path)
    (tmp_path / "images" / "train2017").rename(tmp_path / "train2017")
    data = written.open()
    assert len(data) == 3 and data.paths(0)[0].parent == tmp_path / "train2017"


def test_edges_where_instances_are_given(tmp_path):
    written = coco(tmp_path)
    assert set(written.open()[0]) == {"image", "label"}
    data = written.open(size=(10, 12), edges=True)
    assert (data[1]["edges"].numpy() == edge_map(read_map(data.paths(1)[2]))).all()
    data.paths(1)[2].unlink()
    with pytest.raises(
        UserError, match=r"1 of 3 pictures have no instance map .*000000000001\.jpg; add each .*instances"
    ):
        written.open(edges=True)
