"""Styles: mixing, files, and what does not fit."""

import pytest
import torch

from gan.app.painting.styles import Styles, regions
from gan.files.errors import UserError

NAMES = ("background", "skin", "hair", "hat")


def make(seed=0, present=(0, 1, 2), names=NAMES, length=5):
    here = torch.zeros(len(names), dtype=torch.bool)
    here[list(present)] = True
    codes = torch.randn(len(names), length, generator=torch.Generator().manual_seed(seed))
    return Styles(codes * here.unsqueeze(1), here, names, f"picture {seed}")


def test_taking_regions_changes_their_rows_alone():
    one, other = make(0), make(1, present=(1, 3))
    mixed = one.taking(other, [2, 3])
    assert torch.equal(mixed.codes[:2], one.codes[:2])
    assert torch.equal(mixed.codes[2:], other.codes[2:])
    assert mixed.present.tolist() == [True, True, False, True]
    assert torch.equal(one.codes, make(0).codes)  # the old styles stay as they were


def test_the_way_to_other_styles_is_straight_and_its_ends_are_exact():
    one, other = make(0), make(1, present=(1, 3))
    assert torch.equal(one.towards(other, 0.0).codes, one.codes)
    assert torch.equal(one.towards(other, 1.0).codes, other.codes)
    quarter = one.towards(other, 0.25)
    assert torch.allclose(quarter.codes, 0.75 * one.codes + 0.25 * other.codes)
    assert quarter.present.all()


def test_what_is_lacking():
    assert make(present=(0, 2)).lacking([1, 2, 3]) == [1, 3]


def test_a_file_gives_the_same_bits_and_holds_plain_values(tmp_path):
    path, styles = tmp_path / "new" / "a.pt", make()
    styles.save(path)
    again = Styles.load(path)
    assert torch.equal(again.codes, styles.codes) and torch.equal(again.present, styles.present)
    assert (again.label_names, again.source) == (NAMES, "picture 0")
    assert [each.name for each in path.parent.iterdir()] == ["a.pt"]
    plain = torch.load(path, weights_only=True)
    assert {name: type(value) for name, value in plain.items()} == {
        "codes": torch.Tensor, "present": torch.Tensor, "label_names": list, "source": str,
    }  # fmt: skip


def test_styles_of_other_networks_are_refused(tmp_path):
    path, styles = tmp_path / "a.pt", make()
    styles.check(NAMES, 5, path)
    with pytest.raises(UserError, match=r"a.pt' has styles of 4 regions and this run knows 3"):
        styles.check(NAMES[:3], 5, path)
    with pytest.raises(UserError, match=r"a.pt' has style codes of length 5 and this run has them of length 6"):
        styles.check(NAMES, 6, path)
    with pytest.raises(UserError, match=r"a.pt' calls region 2 'hair' and this run 'fur'; save styles from this run"):
        styles.check(("background", "skin", "fur", "hat"), 5, path)


def test_files_that_are_no_styles_are_refused(tmp_path):
    path, good = tmp_path / "a.pt", {**vars(make()), "label_names": list(NAMES)}
    with pytest.raises(UserError, match=r"there is no file of styles '.*a.pt'; make one with"):
        Styles.load(path)
    path.write_bytes(b"PK nothing")
    with pytest.raises(UserError, match=r"a.pt' cannot be read as styles"):
        Styles.load(path)
    for bad in ({"a": 1}, [1], {**good, "codes": torch.zeros(4)}, {**good, "present": torch.ones(4)}):
        torch.save(bad, path)
        with pytest.raises(UserError, match=r"a.pt' holds no styles"):
            Styles.load(path)
    torch.save({**good, "label_names": ["skin"]}, path)
    with pytest.raises(UserError, match=r"a.pt' is damaged: it has 4 codes and 1 names"):
        Styles.load(path)


def test_a_file_with_code_in_it_is_never_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"codes": Evil()}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="cannot be read as styles"):
        Styles.load(tmp_path / "a.pt")
    assert not (tmp_path / "ran").exists()


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot write styles to '.*a.pt'.*choose another file"):
        make().save(tmp_path / "file" / "a.pt")


def test_regions_go_by_name_or_number():
    assert regions(["Hair", "0", 3], NAMES) == [2, 0, 3]
    assert regions(["1"], ("0", "1", "2")) == [1]
    with pytest.raises(UserError, match=r"no region 'hear'; did you mean 'hair'\? Regions are 0 background, 1 skin"):
        regions(["hear"], NAMES)
    with pytest.raises(UserError, match="no region '4'; choose a name or a number"):
        regions([4], NAMES)
    with pytest.raises(UserError, match=r"Regions are 0, 1, 2$"):
        regions(["x"], ("0", "1", "2"))
