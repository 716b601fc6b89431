"""CelebAMask-HQ: masks are merged in their order, once, and again where one changes."""

import numpy as np
import pytest

from datasets import FLIP_PAIRS, LABELS, CelebAMask
from datasets.files import layouts
from datasets.files.pairs import read_map
from gan.files.errors import UserError
from tests.support.layouts import celebamask as write
from tests.support.layouts import colours, mask, part_of_face, put

SKIN, NOSE, L_EYE, R_EYE, HAIR = 1, 2, 4, 5, 13


@pytest.fixture
def written(tmp_path):
    return write(tmp_path)


@pytest.fixture
def base(written, tmp_path):
    return tmp_path / "CelebAMask-HQ"


def test_labels_are_painted_in_the_given_order(written):
    rows = ["dddddddd"] * 3 + ["01411110", "01122110", "01122110"] + ["01111110"] * 2
    values = np.array([[int(value, 16) for value in row] for row in rows])
    label = written.open()[0]["label"].numpy()
    assert (label == values).all(), "hair, which comes last, lies on the skin and the skin below the rest"
    assert CelebAMask.label_names == LABELS and CelebAMask.flip_pairs == FLIP_PAIRS


def test_splits_follow_the_number_in_celeba_and_the_set_may_lie_in_its_own_folder(written, base):
    def numbers(split):
        data = CelebAMask(base, split, 8)
        return [int(data.paths(k)[0].stem) for k in range(len(data))]

    assert [numbers(split) for split in ("train", "val", "test")] == [[0, 2, 2000], [1, 4], [3]]


def merged(open_set, monkeypatch):
    """The masks that opening the set reads."""
    seen = []
    whole = layouts.merge_masks
    with monkeypatch.context() as patch:
        patch.setattr(layouts, "merge_masks", lambda paths: seen.append(paths[0][1].name[:5]) or whole(paths))
        open_set()
    return seen


def test_masks_are_merged_once_and_again_where_one_changes(written, base, monkeypatch):
    assert merged(written.open, monkeypatch) == ["00000", "00002", "02000"]
    assert merged(written.open, monkeypatch) == []
    put(mask(base, 2, "hat"), part_of_face("nose"))
    assert merged(written.open, monkeypatch) == ["00002"], "added"
    assert written.open()[1]["label"][4, 3] == 14
    mask(base, 2, "hat").unlink()
    assert merged(written.open, monkeypatch) == ["00002"], "removed"
    assert written.open()[1]["label"][4, 3] == NOSE
    put(mask(base, 2000, "nose"), part_of_face("l_eye"))
    assert merged(written.open, monkeypatch) == ["02000"], "changed"
    written.labels[0].unlink()
    assert merged(written.open, monkeypatch) == ["00000"], "lost"
    assert merged(written.open, monkeypatch) == []


def test_a_map_corrected_by_hand_stays(written, monkeypatch):
    written.open()
    values = read_map(written.labels[0])
    values[0, 0] = 18
    put(written.labels[0], values)
    assert merged(written.open, monkeypatch) == [] and written.open()[0]["label"][0, 0] == 18


def test_masks_that_are_missing(written, base):
    for number in (0, 2000):
        for part in ("skin", "nose", "l_eye", "hair"):
            mask(base, number, part).unlink()
    with pytest.raises(UserError) as error:
        written.open()
    for number in (0, 2000):
        assert f"\n  {mask(base, number, '*')} is missing\n" in str(error.value)
    assert str(error.value).count("unpack the data set again") == 1  # the advice for all, once


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda at: mask(at, 2, "hair").write_bytes(b"PNG"), r"_hair\.png cannot be read as a picture .*; replace or"),
        (lambda at: put(mask(at, 2, "nose"), np.zeros((8, 4))), r"_nose\.png is 4x8 and .*_skin\.png is 8x8; masks"),
        (lambda at: put(mask(at, 2, "beard"), part_of_face("nose")), r"_beard\.png is a mask of no known part; known"),
        (lambda at: put(at / "CelebA-HQ-img" / "2.jpg", colours(16, 12)), r"2\.jpg is 12x16 and .*2\.png is 8x8"),
    ],
)
def test_a_file_that_does_not_fit_is_named(spoil, message, written, base):
    spoil(base)
    with pytest.raises(UserError, match=message):
        written.open()


def test_a_mapping_that_is_missing_or_spoiled(written, base):
    mapping = base / layouts.MAPPING
    mapping.write_text("idx orig_idx orig_file\n0 119613 119614.jpg\n1 here 2.jpg\n")
    with pytest.raises(UserError, match=r"mapping\.txt, line 3: '1 here 2.jpg' does not begin with two numbers"):
        written.open()
    mapping.write_text("idx orig_idx orig_file\n0 119613 119614.jpg\n")
    with pytest.raises(UserError, match="has no picture of this split, whose numbers in CelebA are 162771 to 182637"):
        written.open(split="val")
    mapping.unlink()
    for root in (base, base / "nowhere"):
        with pytest.raises(UserError, match=rf"cannot read {root}.*mapping\.txt \(No such file .*\); it comes with"):
            CelebAMask(root, "train", 8)
