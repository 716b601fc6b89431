"""Projection and directions as they are typed, for a run and for a published file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import gan
from gan import sample
from gan.app.sampling import drawings, latents, sheet
from gan.app.sampling.drawings import Drawings
from gan.app.sampling.grids import CELL, MARGIN, TITLE
from gan.files.errors import UserError
from nets.r3 import R3Generator
from tests.support import drawers, opening


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return opening.train(tmp_path_factory.mktemp("projected"), "stylegan-faces", **drawers.SMALL)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Published files, and a picture of somebody."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    drawer = drawers.generator()
    drawer.synthesis.b8.conv0.noise_strength.data.fill_(0.5)
    drawers.publish(folder / "style.pkl", G_ema=drawer, D=drawers.critic())
    drawers.publish(folder / "alone.pkl", G_ema=drawer)
    drawers.publish(folder / "r3.pkl", G=R3Generator(5, (8, 4)))
    Image.linear_gradient("L").resize((40, 30)).save(folder / "me.png")
    (folder / "broken.jpg").write_bytes(b"no")
    return folder


@pytest.fixture(autouse=True)
def few(here, monkeypatch):
    monkeypatch.setattr(latents, "SAMPLES", 300)  # to draw 10,000 latents takes most of the time of a search


def cell(path, column: int, row: int = 0, side: int = 16, left: int = MARGIN) -> np.ndarray:
    """A picture out of a grid, in its own size."""
    zoom = CELL // side
    x, y = left + column * (CELL + MARGIN), TITLE + row * (CELL + MARGIN)
    return np.asarray(Image.open(path))[y : y + CELL : zoom, x : x + CELL : zoom]


def test_a_held_out_picture_is_projected_and_drawn_again(run, capsys):
    typed = ["project", "--picture", "1", "--steps", "6", "--tune", "3", "--device", "cpu"]
    assert sample.main([str(run), *typed, "-o", "new/me.pt"]) == 0
    said = capsys.readouterr().out
    assert "distance by the discriminator's features: " in said and " projected, " in said and " tuned" in said
    assert said.split()[-4::3] == ["new/me.png", "new/me.pkl"]
    truth = np.asarray(gan.open(run, device="cpu").run.run.data.val[1]["image"]).transpose(1, 2, 0)
    assert np.array_equal(cell("new/me.png", 0), truth)

    # The latent file draws the projected picture again, and in the tuned network the tuned one.
    for which, column in ((str(run), 1), ("new/me.pkl", 2)):
        assert sample.main([which, "from", "--latent", "new/me.pt", "-o", "again.png", "--device", "cpu"]) == 0
        assert np.array_equal(np.asarray(Image.open("again.png")), cell("new/me.png", column))
    assert "was found in" not in capsys.readouterr().out

    # A picture is fitted as the run's are.
    opened = gan.open(run, device="cpu")
    Image.new("RGB", (40, 10)).save("wide.png")
    opened.run.settings["fit"] = "pad"
    assert opened._picture("wide.png")[0, ::8, 0].tolist() == [1, -1]

    # And a walk begins there. Its noise is as strong everywhere.
    walk = opened.interpolate(["new/me.pt", 2, "new/me.pt"], frames=3)
    assert len(walk) == 4 and np.array_equal(np.asarray(walk[0]), cell("new/me.png", 1))
    (seed,) = opened.draw("2")
    assert np.abs(np.asarray(walk[2], int) - np.asarray(seed, int)).max() <= 1
    one, other = torch.randn(2, 64, 64, generator=torch.manual_seed(0)).unbind()
    assert latents._noise(one, other, 0.5).std().item() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(
    ("picture", "which", "out"),
    [("me.png", "style.pkl", "me.pt"), ("film.gif", "style.pkl", "./film.pt"), ("me.png", "style.pkl", "style.pt")],
)
def test_what_is_read_is_never_written_over(files, here, tmp_path, monkeypatch, capsys, picture, which, out):
    for name in ("me.png", "style.pkl"):
        (tmp_path / name).write_bytes((files / name).read_bytes())
    Image.open("me.png").save("film.gif")
    monkeypatch.setattr(sheet, "find_spec", lambda name: None)
    monkeypatch.setattr(drawings.latents, "project", lambda *given: pytest.fail("searched"))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    typed = ["project", "--picture", picture, "--tune", "1", "-o", out, "--device", "cpu"]
    assert sample.main([which, *typed]) == 2
    assert "is read and would be written over; type -o and another name" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_search_in_a_network_with_classes_says_where_it_starts(capsys):
    drawers.publish(Path("classes.pkl"), G_ema=drawers.generator(classes=2), D=drawers.critic(classes=2))
    Image.new("RGB", (16, 16)).save("me.png")
    drawings = gan.open("classes.pkl", device="cpu")
    drawings.project("me.png", steps=1, file="a.pt")
    said = capsys.readouterr().out
    assert "from the mean of all 2 classes; --class 0 starts" in said and "by the discriminator's features" in said
    drawings.drawer.class_names = ("cat", "dog")
    drawings.project("me.png", steps=1, file="a.pt")
    assert "; --class cat starts" in capsys.readouterr().out
    drawings.project("me.png", steps=1, file="a.pt", label="dog")
    assert "class" not in capsys.readouterr().out
    drawings.project(Image.open("me.png"), steps=1, file="b.pt", label="dog")
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()
    assert repr(drawings) == "<Drawings of classes.pkl, 16x16>"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["style.pkl", "project", "--picture", "0"], "cannot read a picture: there is no file"),
        (["style.pkl", "project", "--picture", "broken.jpg"], "broken.jpg cannot be read as a picture"),
        (["alone.pkl", "project", "--picture", "me.png"], "no discriminator to compare by; type --perceptual"),
        (["style.pkl", "project", "--picture", "me.png", "--perceptual", "me.png"], "cannot be read as weights"),
        (["r3.pkl", "project", "--picture", "me.png"], "R3Generator has no styles"),
        (["r3.pkl", "directions"], "R3Generator has no styles"),
        (["style.pkl", "directions", "--direction", "6"], "there is no direction 6; type --direction and one of"),
        (["style.pkl", "directions", "--strength", "4"], "--strength 4 is not from one whole number to a larger one"),
        (["style.pkl", "from", "--latent", "me.png"], "'me.png' cannot be read as a latent file"),
        (["style.pkl", "from"], "from needs latent files; type --latent me.pt"),
    ],
)  # fmt: skip
def test_mistakes_are_answered_in_words(files, monkeypatch, capsys, words, said):
    monkeypatch.chdir(files)
    assert sample.main([*words, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


def test_errors_in_python_name_its_arguments_and_actions(files):
    opened = gan.open(files / "style.pkl", "cpu")
    for act, said in (
        (lambda: opened.draw([3], label=1), r"the network has no classes; leave label= out$"),
        (lambda: opened.sample([3], label=1), r"the network has no classes; leave label= out$"),
        (opened.classes, r"the network has no classes; type draw\(\)$"),
        (lambda: opened.draw([3], truncation="q"), r"cutoff= take numbers; type e.g. truncation=0.7$"),
        (lambda: opened.interpolate(3), r"got 1; type between=\[3, 5, 9\]$"),
    ):
        with pytest.raises(UserError, match=said):
            act()


def test_networks_that_cannot_be_written_are_not_tuned():
    drawings = Drawings(drawers.drawer(size=(16, 12)))
    with pytest.raises(UserError, match="published files, as tuned networks are, draw no 12x16; leave tune= out"):
        drawings.project(0, steps=1, tune=1)
