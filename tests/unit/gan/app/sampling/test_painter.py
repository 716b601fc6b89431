"""Using a run: pictures by name, their styles, painting, and the mean."""

import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image, ImageOps

from datasets import Faces
from gan.app.page import run_tables
from gan.app.run.reopen import open_run
from gan.app.sampling import grids
from gan.app.sampling.painter import PAIR, Painter, Styles
from gan.files.errors import UserError
from nets.blocks import edges_of
from tests.support import layouts, opening


@pytest.fixture(scope="module")
def opened(sean_run):
    return open_run(str(sean_run))


@pytest.fixture
def painter(opened):
    return Painter(opened)


@pytest.fixture
def copied(sean_run, tmp_path):
    return Painter(open_run(str(shutil.copytree(sean_run, tmp_path / "001-copy"))))


def test_pictures_may_be_files(painter, tmp_path):
    faces = Faces(1, size=64, seed=5)
    faces.draw(0).save(tmp_path / "me.png")
    faces.label(0).save(tmp_path / "mine.png")
    both = painter.picture(f"{tmp_path}/me.png:{tmp_path}/mine.png")
    alone = painter.picture(f"{tmp_path}/mine.png")
    assert (both.title, alone.title) == ("me", "mine")
    assert both.image.shape == (3, 32, 32) and both.label.shape == (32, 32)
    assert alone.image is None and torch.equal(alone.label, both.label)
    with pytest.raises(UserError, match="'mine' is only a label map; give its picture too"):
        painter.styles(alone)


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
    assert styles.present[0] and styles.label_names == Faces.label_names
    assert "picture 1 of 001-copy, step 2" in styles.source
    path = tmp_path / "a.pt"
    styles.save(path)
    assert torch.equal(copied.load(path).codes, styles.codes)
    Styles(torch.zeros(19, 9), styles.present, styles.label_names, "x").save(path)
    with pytest.raises(UserError, match=r"a.pt' has style codes of length 9 and this run has them of length 8"):
        copied.load(path)
    kept = copied.opened.folder.path / "styles"
    shutil.rmtree(kept, ignore_errors=True)  # the run that was copied may have them from another test
    kept.write_text("in the way")  # there is a mean all the same
    assert copied.mean(2).present[0] and "not kept: cannot write" in capsys.readouterr().out


def test_the_mean_is_over_the_training_pictures_that_have_the_region(copied):
    every = [copied.styles(copied.picture(f"train:{k}")) for k in range(16)]
    mean = copied.mean()
    for region in range(19):
        having = [styles.codes[region] for styles in every if styles.present[region]]
        assert bool(mean.present[region]) == bool(having)
        expected = torch.stack(having).mean(0) if having else torch.zeros(8)
        assert torch.allclose(mean.codes[region], expected, atol=1e-6)
    few = copied.mean(2)
    assert few.source.startswith("the mean of 2 training pictures of ")
    ends = [every[0], every[15]]
    assert torch.allclose(few.codes[0], torch.stack([styles.codes[0] for styles in ends]).mean(0), atol=1e-6)


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
    assert picture.edges.shape == picture.label.shape == (16, 32) and 0 < picture.edges.float().mean() < 1
    styles = painter.styles(picture)
    without = replace(picture, edges=torch.zeros_like(picture.edges))
    assert torch.equal(painter.styles(without).codes, styles.codes)
    assert not torch.equal(painter.paint(without, styles), painter.paint(picture, styles))
    # A label map that a user drew has the edges of its regions.
    drawn = replace(picture, edges=None)
    assert torch.equal(
        painter.paint(drawn, styles), painter.paint(replace(picture, edges=edges_of(drawn.label[None])[0]), styles)
    )


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
