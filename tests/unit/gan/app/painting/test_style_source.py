"""Where styles come from, and what replaces missing ones."""

import pytest
import torch

from gan.app.painting.actions import StyleSource
from gan.app.painting.painter import Painter, Picture
from gan.app.painting.reopen import open_run
from gan.app.painting.styles import Styles
from gan.files.errors import UserError

HAIR, HAT = 13, 14


@pytest.fixture(scope="module")
def painter(sean_run):
    return Painter(open_run(str(sean_run)))


def lacks(painter, picture, *regions):
    """The styles of a picture, without those of these regions."""
    source = StyleSource(painter, picture)
    keep = torch.ones(19, dtype=torch.bool)
    keep[list(regions)] = False
    styles = source.styles
    source.styles = Styles(styles.codes * keep[:, None], styles.present & keep, styles.label_names, styles.source)
    return source


def test_it_may_be_a_picture_a_file_or_the_mean(painter, tmp_path):
    picture = StyleSource(painter, "2")
    assert picture.title == "2" and picture.image is picture.picture.image
    picture.styles.save(tmp_path / "a.pt")
    saved = StyleSource(painter, str(tmp_path / "a.pt"))
    assert (saved.title, saved.picture, saved.image, saved.spotlight(0)) == ("a", None, None, None)
    assert torch.equal(saved.styles.codes, picture.styles.codes)
    mean = StyleSource(painter, "mean", among=4)
    assert mean.title == "mean" and torch.equal(mean.styles.codes, painter.mean(4).codes)


def test_all_of_its_styles_are_used_or_those_of_some_regions(painter):
    source, target = StyleSource(painter, "2", "zero"), painter.picture("0")
    own = painter.styles(target)
    assert torch.equal(source.on(target).codes, source.styles.codes)
    mixed = source.on(target, [HAIR])
    assert torch.equal(mixed.codes[HAIR], source.styles.codes[HAIR])
    rest = [region for region in range(19) if region != HAIR]
    assert torch.equal(mixed.codes[rest], own.codes[rest])
    assert not torch.equal(mixed.codes[HAIR], own.codes[HAIR])


@pytest.mark.parametrize("missing", ["mean", "own", "zero"])
def test_what_it_lacks_is_filled_in_as_asked(missing, painter):
    target = painter.picture("0")
    source = lacks(painter, "2", HAIR)
    source.missing = missing
    expected = {
        "mean": painter.mean().codes[HAIR],
        "own": painter.styles(target).codes[HAIR],
        "zero": torch.zeros(8),
    }[missing]
    assert torch.equal(source.on(target).codes[HAIR], expected)
    assert torch.equal(source.on(target, [HAIR]).codes[HAIR], expected)
    assert torch.equal(source.on(target).codes[0], source.styles.codes[0])
    words = {"mean": "painted in the mean styles", "own": "painted in the picture's own"}
    said = "; ".join(source.notes())
    assert ("hair" in said) == (missing != "zero") and words.get(missing, "") in said


def test_only_what_the_label_map_shows_is_filled_in(painter):
    source = lacks(painter, "2", HAIR)
    bald = Picture("bald", torch.zeros(32, 32, dtype=torch.int64))
    assert torch.equal(source.on(bald).codes, source.styles.codes)
    assert source.notes() == []


def test_a_region_that_no_picture_has_is_painted_without_style_and_said(painter, monkeypatch):
    mean = painter.mean()
    monkeypatch.setattr(painter, "mean", lambda among: mean.taking(lacks(painter, "2", HAIR).styles, [HAIR]))
    source = lacks(painter, "2", HAIR)
    assert torch.equal(source.on(painter.picture("0")).codes[HAIR], torch.zeros(8))
    assert "styles of 2 lack hair: as do all pictures that the mean is of; painted without style" in source.notes()


def test_a_pictures_own_regions_are_not_missing_on_itself(painter):
    source = lacks(painter, "2", HAIR)  # as if it were too small for the encoder
    assert torch.equal(source.on(painter.picture("2")).codes, source.styles.codes)
    edited = Picture("edited", painter.picture("2").label.roll(1, 0))
    assert torch.equal(source.on(edited, edited=True).codes[HAIR], torch.zeros(8))
    assert torch.equal(source.on(edited).codes[HAIR], painter.mean().codes[HAIR])


def test_a_region_that_the_painted_picture_lacks_is_said(painter):
    source, bare = StyleSource(painter, "2"), painter.picture("0")
    label = torch.where(bare.label == HAT, 0, bare.label)
    source.on(Picture("0", label, bare.image), [HAT, HAIR])
    assert "picture 0 lacks hat: nothing to change there" in source.notes()


def test_regions_of_a_label_map_alone_cannot_keep_styles(painter):
    with pytest.raises(UserError, match="'x' is only a label map; give its picture too"):
        StyleSource(painter, "2").on(Picture("x", painter.picture("0").label), [HAIR])


def test_the_spotlight_leaves_the_region_alone(painter):
    source = StyleSource(painter, "2")
    lit, inside = source.spotlight(HAIR), source.picture.label == HAIR
    assert torch.equal(lit[:, inside], source.image[:, inside])
    assert (lit[0] == lit[1])[~inside].all() and (lit[:, ~inside] > 0.3).all()
