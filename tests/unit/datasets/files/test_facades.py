"""CMP facades: numbered from one, and split by turns."""

from datasets import Facades
from tests.support.layouts import facades


def test_labels_are_numbered_as_in_the_files():
    assert Facades.num_labels == 13 == len(set(Facades.label_names))
    assert [Facades.label_names[k] for k in (0, 1, 2, 3, 12)] == ["none", "background", "facade", "window", "shop"]


def test_splits_take_turns_through_both_folders(tmp_path):
    written = facades(tmp_path)
    names = {
        split: [data.paths(k)[0].stem for k in range(len(data))]
        for split in ("train", "val", "test")
        for data in [written.open(split=split)]
    }
    assert names["val"] == ["cmp_b0005", "cmp_x0003"] and names["test"] == ["cmp_b0006", "cmp_x0004"]
    assert names["train"] == [*(f"cmp_b000{k}" for k in (1, 2, 3, 4, 7, 8)), "cmp_x0001", "cmp_x0002"]
    assert len(list((tmp_path / "gan-cache").glob("checked-*.jsonl"))) == 1, "one index for all"


def test_606_make_404_and_101_and_101():
    turns = [k % 6 for k in range(606)]
    assert (sum(t < 4 for t in turns), turns.count(4), turns.count(5)) == (404, 101, 101)
