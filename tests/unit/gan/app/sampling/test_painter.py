"""Using a run that paints in styles: pictures by name, label maps, the mean, and styles: where they are from; files."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from datasets import Faces
from datasets.files import pairs
from gan.app.page import run_tables
from gan.app.run.reopen import open_run
from gan.app.sampling import grids
from gan.app.sampling.painter import PAIR, Maps, Painter, Picture, Styles, regions
from gan.app.sampling.paintings import StyleSource
from gan.files.errors import UserError
from nets.blocks import edges_of
from tests.support import layouts, opening
from tests.support.saved import Malice


@pytest.fixture(scope="module")
def painter(sean_run):
    return Painter(open_run(str(sean_run)))


@pytest.fixture
def copied(sean_run, tmp_path):
    return Painter(open_run(str(shutil.copytree(sean_run, tmp_path / "001-copy"))))


def test_pictures_may_be_files(painter, tmp_path):
    faces = Faces(1, size=64, seed=5)
    faces.draw(0).save(tmp_path / "me.png")
    faces.label(0).save(tmp_path / "mine.png")
    both, alone = (painter.picture(f"{tmp_path}/{name}") for name in (f"me.png:{tmp_path}/mine.png", "mine.png"))
    assert (both.title, alone.title) == ("me", "mine")
    assert both.image.shape == (3, 32, 32) and both.label.shape == (32, 32)
    assert alone.image is None and torch.equal(alone.label, both.label)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("4", "there is no held-out picture 4; choose from 0 to 3"),
        ("train:16", "there is no training picture 16; choose from 0 to 15"),
        ("me.jpg", r"'me.jpg' is no picture; give the number of a held-out one \(0 to 3\), train:NUMBER, or files"),
        ("-1", "'-1' is no picture"),
        ("a.jpg:b.png", "there is no file 'a.jpg'"),
        ("b.png", "there is no file 'b.png'"),
    ],
)
def test_pictures_that_there_are_not_are_refused(which, message, painter):
    with pytest.raises(UserError, match=message):
        painter.picture(which)


def test_styles_are_the_encoders_and_absent_regions_have_none(copied, tmp_path, capsys):
    picture = copied.picture("1")
    styles = copied.styles(picture)
    codes = copied.game.encoder(picture.image[None], copied.game.mask(picture.label[None]))[0]
    assert torch.equal(styles.codes, codes)
    absent = set(range(19)) - set(picture.regions)
    assert absent and styles.lacking(sorted(absent)) == sorted(absent)
    assert styles.present[0] and "picture 1 of 001-copy, step 2" in styles.source
    styles.save(tmp_path / "a.pt")
    assert torch.equal(copied.load(tmp_path / "a.pt").codes, styles.codes)
    Styles(torch.zeros(19, 9), styles.present, styles.label_names, "x").save(tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"a.pt' has style codes of length 9 and this run has them of length 8"):
        copied.load(tmp_path / "a.pt")
    kept = copied.opened.folder.path / "styles"
    shutil.rmtree(kept, ignore_errors=True)  # the run that was copied may have them from another test
    kept.write_text("in the way")  # there is a mean all the same
    assert copied.mean(2).present[0] and "not kept: cannot write" in capsys.readouterr().out


def test_the_mean_is_over_the_training_pictures_that_have_the_region(copied):
    every = [copied.styles(copied.picture(f"train:{k}")) for k in range(16)]
    for mean, having in ((copied.mean(), every), (copied.mean(2), [every[0], every[15]])):
        assert mean.source.startswith(f"the mean of {len(having)} training pictures of ")
        for region in range(19):
            codes = [styles.codes[region] for styles in having if styles.present[region]]
            expected = torch.stack(codes).mean(0) if codes else torch.zeros(8)
            assert bool(mean.present[region]) == bool(codes)
            assert torch.allclose(mean.codes[region], expected, atol=1e-6)


def test_the_mean_is_computed_again_for_other_pictures_at_the_same_checkpoint(folder_run, tmp_path):
    run = shutil.copytree(folder_run, tmp_path / "001-copy")
    data = shutil.copytree(folder_run.parent.parent / "data", tmp_path / "data")
    first = Painter(open_run(str(run), data=str(data))).mean()
    for path in (data / "images").iterdir():
        ImageOps.invert(Image.open(path)).save(path)
    assert not torch.equal(Painter(open_run(str(run), data=str(data))).mean().codes, first.codes)


def test_edges_of_instances_are_shown_to_the_generator_alone_and_on_the_page(tmp_path):
    layouts.cityscapes(tmp_path / "data")
    settings = {**opening.SMALL, "size": 16, "batch_size": 1, "held_out": 1, "perceptual": "off"}
    opened = opening.untrained("sean-cityscapes", data=str(tmp_path / "data"), max_steps=1, **settings)
    painter = Painter(opened)
    picture = painter.picture("0")
    shown = {each.title: each.cells[0].pictures for each in run_tables.masks(opened, 1).rows}
    assert list(shown) == ["picture", "mask", "edges", "painted anew"]
    assert shown["edges"][0].tobytes() == grids.picture(1 - 2.0 * picture.edges[None]).tobytes()
    assert 0 < picture.edges.float().mean() < 1
    styles, without = painter.styles(picture), replace(picture, edges=torch.zeros_like(picture.edges))
    assert torch.equal(painter.styles(without).codes, styles.codes)
    assert not torch.equal(painter.paint(without, styles), painter.paint(picture, styles))
    # A label map that a user drew has the edges of its regions.
    edges = edges_of(picture.label[None])[0]
    drawn, given = (painter.paint(replace(picture, edges=each), styles) for each in (None, edges))
    assert torch.equal(drawn, given)


@pytest.mark.parametrize(
    ("typed", "files"),
    [
        ("me.jpg:l.png", ("me.jpg", "l.png")),
        (r"C:\me.jpg:D:\l.png", (r"C:\me.jpg", r"D:\l.png")),
        (r"me.jpg:D:\l.png", ("me.jpg", r"D:\l.png")),
        ("C:/l.png", None),
    ],
)
def test_a_drive_is_no_picture(typed, files):
    found = PAIR.fullmatch(typed)
    assert (found and found.groups()) == files


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
        (4, ("0", "1", "2"), r"no region '4'; choose a name or a number\. Regions are 0, 1, 2$"),
    ):
        with pytest.raises(UserError, match=words):
            regions([typed], names)


# ---- style source ----


HAIR, HAT = 13, 14


def lacks(painter, picture, *regions):
    """The styles of a picture, without those of these regions."""
    source = StyleSource(painter, picture)
    keep = torch.ones(19, dtype=torch.bool)
    keep[list(regions)] = False
    styles = source.styles
    source.styles = Styles(styles.codes * keep[:, None], styles.present & keep, styles.label_names, styles.source)
    return source


@pytest.mark.parametrize(
    ("missing", "how"), [("mean", "painted in the mean styles"), ("own", "painted in the picture's own"), ("zero", "")]
)
def test_what_it_lacks_is_filled_in_as_asked(missing, how, painter):
    target, source = painter.picture("0"), lacks(painter, "2", HAIR)
    source.missing = missing
    codes = {"mean": painter.mean().codes[HAIR], "own": painter.styles(target).codes[HAIR], "zero": torch.zeros(8)}
    for among in ((), ([HAIR],)):
        assert torch.equal(source.on(target, *among).codes[HAIR], codes[missing])
    assert torch.equal(source.on(target).codes[0], source.styles.codes[0])
    said = "; ".join(source.notes())
    assert ("hair" in said) == bool(how) and how in said and source.notes() == []


def test_a_region_that_no_picture_has_is_painted_without_style_and_said(painter, monkeypatch):
    mean = painter.mean()
    monkeypatch.setattr(painter, "mean", lambda among: mean.taking(lacks(painter, "2", HAIR).styles, [HAIR]))
    source = lacks(painter, "2", HAIR)
    assert torch.equal(source.on(painter.picture("0")).codes[HAIR], torch.zeros(8))
    assert "styles of 2 lack hair: as do all pictures that the mean is of; painted without style" in source.notes()


def test_a_pictures_own_regions_are_not_missing_on_itself_nor_those_that_a_map_does_not_show(painter):
    source = lacks(painter, "2", HAIR)  # as if it were too small for the encoder
    bald = Picture("bald", torch.zeros(32, 32, dtype=torch.int64))
    for on in (painter.picture("2"), bald):
        assert torch.equal(source.on(on).codes, source.styles.codes) and source.notes() == []
    edited = Picture("edited", painter.picture("2").label.roll(1, 0))
    assert torch.equal(source.on(edited, edited=True).codes[HAIR], torch.zeros(8))
    assert torch.equal(source.on(edited).codes[HAIR], painter.mean().codes[HAIR])
    with pytest.raises(UserError, match="'x' is only a label map; give its picture too"):
        StyleSource(painter, "2").on(Picture("x", painter.picture("0").label), [HAIR])


def test_a_region_that_the_painted_picture_lacks_is_said(painter):
    source, bare = StyleSource(painter, "2"), painter.picture("0")
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


def test_a_label_out_of_range_may_be_void(tmp_path):
    numbers = np.array(FACES.label(0))
    numbers[3, 4] = 19
    Image.fromarray(numbers).save(tmp_path / "a.png")
    assert read(tmp_path / "a.png", void={19: 3})[3, 4] == 3


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
