"""Styles: where they come from, and their files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from datasets import Faces
from datasets.files import pairs
from gan.app.run.reopen import open_run
from gan.app.sampling import grids
from gan.app.sampling.painter import Maps, Painter, Picture, Styles, regions
from gan.app.sampling.paintings import StyleSource
from gan.files.errors import UserError
from tests.support.saved import Malice

NAMES = ("background", "skin", "hair", "hat")


def make(seed=0, present=(0, 1, 2), names=NAMES, length=5):
    here = torch.tensor([number in present for number in range(len(names))])
    codes = torch.randn(len(names), length, generator=torch.Generator().manual_seed(seed))
    return Styles(codes * here.unsqueeze(1), here, names, f"picture {seed}")


def test_taking_regions_changes_their_rows_alone():
    one, other = make(0), make(1, present=(1, 3))
    mixed = one.taking(other, [2, 3])
    assert torch.equal(mixed.codes[:2], one.codes[:2])
    assert torch.equal(mixed.codes[2:], other.codes[2:])
    assert mixed.present.tolist() == [True, True, False, True] and mixed.lacking([1, 2, 3]) == [2]
    assert torch.equal(one.codes, make(0).codes)  # the old styles stay as they were


def test_styles_of_other_networks_are_refused(tmp_path):
    path, styles = tmp_path / "a.pt", make()
    styles.check(NAMES, 5, path)
    with pytest.raises(UserError, match=r"a.pt' has styles of 4 regions and this run knows 3"):
        styles.check(NAMES[:3], 5, path)
    with pytest.raises(UserError, match=r"a.pt' has style codes of length 5 and this run has them of length 6"):
        styles.check(NAMES, 6, path)
    with pytest.raises(UserError, match=r"a.pt' calls region 2 'hair' and this run 'fur'; save styles from this run"):
        styles.check(("background", "skin", "fur", "hat"), 5, path)
    styles.check(("background", "skin", "2", "hat"), 5, path)  # saved before the set had names, or after


GOOD = {**vars(make()), "label_names": list(NAMES)}


@pytest.mark.promise("code in a checkpoint, or in a file of styles")
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"a.pt' cannot be read as styles: No such file or directory; make such a file with"),
        (b"PK nothing", r"a.pt' cannot be read as styles"),
        ({"codes": Malice(Path("ran"))}, r"a.pt' cannot be read as styles"),
        ({"a": 1}, r"a.pt' holds no styles"),
        ({**GOOD, "codes": torch.zeros(4)}, r"a.pt' holds no styles"),
        ({**GOOD, "present": torch.ones(4)}, r"a.pt' holds no styles"),
        ({**GOOD, "label_names": ["skin"]}, r"a.pt' is damaged: it has 4 codes and 1 names"),
    ],
)
def test_files_that_are_no_styles_are_refused_and_code_in_them_is_never_run(content, words, here):
    path = here / "a.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(UserError, match=words):
        Styles.load(path)
    assert not (here / "ran").exists()
    with pytest.raises(UserError, match=r"cannot write '.*b.pt'.*choose another file"):
        make().save(Path("/proc/none/b.pt"))


def test_regions_go_by_name_or_number():
    assert regions(["Hair", "0", 3], NAMES) == [2, 0, 3]
    assert regions(["1"], ("0", "1", "2")) == [1]
    for typed, names, words in (
        ("hear", NAMES, r"no region 'hear'; did you mean 'hair'\? Regions are 0 background, 1 skin"),
        (4, NAMES, "no region '4'; choose a name or a number"),
        ("x", ("0", "1", "2"), r"a number\. Regions are 0, 1, 2$"),
    ):
        with pytest.raises(UserError, match=words):
            regions([typed], names)


# ---- style source ----


HAIR, HAT = 13, 14


@pytest.fixture(scope="module")
def artist(sean_run):
    return Painter(open_run(str(sean_run)))


def lacks(artist, picture, *regions):
    """The styles of a picture, without those of these regions."""
    source = StyleSource(artist, picture)
    keep = torch.ones(19, dtype=torch.bool)
    keep[list(regions)] = False
    styles = source.styles
    source.styles = Styles(styles.codes * keep[:, None], styles.present & keep, styles.label_names, styles.source)
    return source


@pytest.mark.parametrize("missing", ["mean", "own", "zero"])
def test_what_it_lacks_is_filled_in_as_asked(missing, artist):
    target = artist.picture("0")
    source = lacks(artist, "2", HAIR)
    source.missing = missing
    codes = {"mean": artist.mean().codes[HAIR], "own": artist.styles(target).codes[HAIR], "zero": torch.zeros(8)}
    for among in ((), ([HAIR],)):
        assert torch.equal(source.on(target, *among).codes[HAIR], codes[missing])
    assert torch.equal(source.on(target).codes[0], source.styles.codes[0])
    words = {"mean": "painted in the mean styles", "own": "painted in the picture's own"}
    said = "; ".join(source.notes())
    assert ("hair" in said) == (missing != "zero") and words.get(missing, "") in said


def test_a_region_that_no_picture_has_is_painted_without_style_and_said(artist, monkeypatch):
    mean = artist.mean()
    monkeypatch.setattr(artist, "mean", lambda among: mean.taking(lacks(artist, "2", HAIR).styles, [HAIR]))
    source = lacks(artist, "2", HAIR)
    assert torch.equal(source.on(artist.picture("0")).codes[HAIR], torch.zeros(8))
    assert "styles of 2 lack hair: as do all pictures that the mean is of; painted without style" in source.notes()


def test_a_pictures_own_regions_are_not_missing_on_itself_nor_those_that_a_map_does_not_show(artist):
    source = lacks(artist, "2", HAIR)  # as if it were too small for the encoder
    bald = Picture("bald", torch.zeros(32, 32, dtype=torch.int64))
    for on in (artist.picture("2"), bald):
        assert torch.equal(source.on(on).codes, source.styles.codes) and source.notes() == []
    edited = Picture("edited", artist.picture("2").label.roll(1, 0))
    assert torch.equal(source.on(edited, edited=True).codes[HAIR], torch.zeros(8))
    assert torch.equal(source.on(edited).codes[HAIR], artist.mean().codes[HAIR])
    with pytest.raises(UserError, match="'x' is only a label map; give its picture too"):
        StyleSource(artist, "2").on(Picture("x", artist.picture("0").label), [HAIR])


def test_a_region_that_the_painted_picture_lacks_is_said(artist):
    source, bare = StyleSource(artist, "2"), artist.picture("0")
    label = torch.where(bare.label == HAT, 0, bare.label)
    source.on(Picture("0", label, bare.image), [HAT, HAIR])
    assert "picture 0 lacks hat: nothing to change there" in source.notes()


# ---- inputs ----


FACES = Faces(2, size=64)
LABELS = FACES.num_labels


def label(size=64):
    return torch.from_numpy(np.array(FACES.label(0).resize((size, size), Image.Resampling.NEAREST))).long()


def read(path, size=(64, 64), labels=LABELS, void=None):
    return Maps(size, labels, void or {}).read(pairs.loaded(path), path)


@pytest.mark.parametrize("mode", ["L", "I;16", "P", "ours", "RGB", "RGBA"])
def test_labels_are_read_as_numbers_or_as_colours(mode, tmp_path):
    path, numbers = tmp_path / "a.png", FACES.label(0)
    if mode == "P":
        numbers.putpalette([k for k in range(256) for _ in range(3)])  # some other palette: the numbers count
    elif mode in ("ours", "RGB", "RGBA"):
        numbers = grids.label_png(label(), LABELS)
    (numbers if mode in ("P", "ours") else numbers.convert(mode)).save(path)
    assert torch.equal(read(path), label())
    assert torch.equal(read(path, (32, 32)), label(32))


@pytest.mark.parametrize("value", [19, 255])
def test_a_label_out_of_range_is_refused_by_file_and_value_unless_it_is_void(value, tmp_path):
    numbers = np.array(FACES.label(0))
    numbers[3, 4] = value
    Image.fromarray(numbers).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=rf"a.png has the label {value}; with 19 labels the allowed range is 0..18"):
        read(tmp_path / "a.png", (8, 8))  # also where the resized map would not show it
    assert read(tmp_path / "a.png", void={value: 3})[3, 4] == 3


def test_a_colour_that_is_no_labels_is_refused_by_file_colour_and_place(tmp_path):
    image = grids.label_png(label(), LABELS).convert("RGB")
    image.putpixel((5, 7), (1, 2, 3))
    image.save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"a.png has the colour #010203 at column 5, row 7, and in 1 pixels"):
        read(tmp_path / "a.png")
    FACES.draw(0).save(tmp_path / "b.png")
    with pytest.raises(UserError, match=r"b.png has the colour .* paint without soft edges"):
        read(tmp_path / "b.png")


def test_a_pair_must_show_the_same(tmp_path):
    image, labels = tmp_path / "a.jpg", tmp_path / "a.png"
    FACES.draw(0).resize((128, 128)).save(image)
    FACES.label(0).save(labels)
    maps = Maps((32, 32), LABELS)
    picture, numbers = maps.pair(image, labels)
    assert picture.shape == (3, 32, 32) and torch.equal(numbers, label(32))
    FACES.label(0).resize((64, 32)).save(labels)
    with pytest.raises(UserError, match=r"a.jpg is 128x128 and .*a.png is 64x32; .* must be of the same shape"):
        maps.pair(image, labels)
