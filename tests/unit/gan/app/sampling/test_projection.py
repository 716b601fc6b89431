"""Latents: found for a picture, moved in directions, kept in files; as typed, for a run and for a published file."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from torchmetrics.functional.image.lpips import _LPIPS
from torchvision import models

import gan
from gan import sample
from gan.app.sampling import drawings, latents, sheet
from gan.app.sampling.drawings import Drawings
from gan.app.sampling.grids import CELL, MARGIN, TITLE
from gan.app.sampling.latents import (
    Latent,
    by_discriminator,
    by_lpips,
    correlation,
    directions,
    distance_from,
    drawn,
    noise_maps,
    project,
    some_w,
    tuned,
)
from gan.files.errors import UserError
from nets.r3 import R3Generator
from tests.support import drawers, narrow_vgg, opening
from tests.support.drawers import generator


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


def cell(path, column: int) -> np.ndarray:
    """A picture of 16 pixels out of a grid of one row."""
    zoom, left = CELL // 16, MARGIN + column * (CELL + MARGIN)
    return np.asarray(Image.open(path))[TITLE : TITLE + CELL : zoom, left : left + CELL : zoom]


def test_a_held_out_picture_is_projected_and_drawn_again(run, capsys):
    typed = ["project", "--picture", "1", "--steps", "6", "--tune", "3", "--device", "cpu"]
    assert sample.main([str(run), *typed, "-o", "new/me.pt"]) == 0
    said = capsys.readouterr().out
    assert "distance by the discriminator's features: " in said and " projected, " in said and " tuned" in said
    assert said.split()[-4::3] == ["new/me.png", "new/me.pkl"]
    opened = gan.open(run, device="cpu")
    truth = np.asarray(opened.run.run.data.val[1]["image"]).transpose(1, 2, 0)
    assert np.array_equal(cell("new/me.png", 0), truth)

    # The latent file draws the projected picture again, and in the tuned network the tuned one.
    for which, column in ((str(run), 1), ("new/me.pkl", 2)):
        assert sample.main([which, "from", "--latent", "new/me.pt", "-o", "again.png", "--device", "cpu"]) == 0
        assert np.array_equal(np.asarray(Image.open("again.png")), cell("new/me.png", column))
    assert "was found in" not in capsys.readouterr().out

    # A picture is fitted as the run's are.
    Image.new("RGB", (40, 10)).save("wide.png")
    opened.run.settings["fit"] = "pad"
    assert opened._picture("wide.png")[0, ::8, 0].tolist() == [1, -1]

    # And a walk begins there. Its noise is as strong everywhere.
    walk = opened.interpolate(["new/me.pt", 2, "new/me.pt"], frames=3)
    (seed,) = opened.draw("2")
    assert len(walk) == 4 and np.array_equal(np.asarray(walk[0]), cell("new/me.png", 1))
    assert np.abs(np.asarray(walk[2], int) - np.asarray(seed, int)).max() <= 1
    one, other = torch.randn(2, 64, 64, generator=torch.manual_seed(0)).unbind()
    assert latents._noise(one, other, 0.5).std().item() == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(
    ("picture", "which", "out"),
    [("me.png", "style.pkl", "me.pt"), ("film.gif", "style.pkl", "./film.pt"), ("me.png", "style.pkl", "style.pt")],
)
def test_what_is_read_is_never_written_over(files, here, monkeypatch, capsys, picture, which, out):
    for name in ("me.png", "style.pkl"):
        (here / name).write_bytes((files / name).read_bytes())
    Image.open("me.png").save("film.gif")
    monkeypatch.setattr(sheet, "find_spec", lambda name: None)
    monkeypatch.setattr(drawings.latents, "project", lambda *given: pytest.fail("searched"))
    before = {path: path.read_bytes() for path in here.iterdir()}
    assert sample.main([which, "project", "--picture", picture, "--tune", "1", "-o", out, "--device", "cpu"]) == 2
    assert "is read and would be written over; type -o and another name" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in here.iterdir()} == before


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
    for picture, file in (("me.png", "a.pt"), (Image.open("me.png"), "b.pt")):
        drawings.project(picture, steps=1, file=file, label="dog")
        assert "class" not in capsys.readouterr().out
    assert Path("a.png").read_bytes() == Path("b.png").read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["style.pkl", "project", "--picture", "0"], "cannot read a picture: there is no file"),
        (["style.pkl", "project", "--picture", "broken.jpg"], "broken.jpg cannot be read as a picture"),
        (["alone.pkl", "project", "--picture", "me.png"], "no discriminator to compare by; type --perceptual"),
        (["style.pkl", "project", "--picture", "me.png", "--perceptual", "me.png"], "cannot be read as weights"),
        (["r3.pkl", "project", "--picture", "me.png"], "R3Generator has no styles"),
        (["style.pkl", "directions", "--direction", "6"], "there is no direction 6; type --direction and one of"),
        (["style.pkl", "directions", "--strength", "4"], "--strength 4 is not from one whole number to a larger one"),
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
        (opened.classes, r"the network has no classes; type draw\(\)$"),
        (lambda: opened.draw([3], truncation="q"), r"cutoff= take numbers; type e.g. truncation=0.7$"),
        (lambda: opened.interpolate(3), r"got 1; type between=\[3, 5, 9\]$"),
        (lambda: opened.transfer(from_=1, to=[2]), "so there is no 'transfer'; its actions are classes, .*draw, files"),
    ):
        with pytest.raises(UserError, match=said):
            act()


def test_networks_that_cannot_be_written_are_not_tuned():
    drawings = Drawings(drawers.drawer(size=(16, 12)))
    with pytest.raises(UserError, match="published files, as tuned networks are, draw no 12x16; leave tune= out"):
        drawings.project(0, steps=1, tune=1)


@pytest.fixture(scope="module")
def drawer():
    return drawers.drawer(grain=0.1)


@pytest.fixture(scope="module")
def critic():
    torch.manual_seed(1)
    return drawers.critic()


@pytest.fixture(scope="module")
def distance(drawer, critic):
    """The distance from a picture that the generator has drawn, in the features of a discriminator."""
    return distance_from(drawer.pictures([3]), by_discriminator(critic))


def found(drawer, distance, steps=30):
    """The latent, the distance of the first picture, and that of the last."""
    seen = []
    latent = project(drawer, distance, steps, lambda picture, far: seen.append(far))
    return latent, seen[0], distance(drawn(drawer.net, latent)).item()


def test_a_drawn_picture_is_found_again(drawer, distance):
    latent, first, last = found(drawer, distance)
    assert last < first / 8
    assert latent.w.shape == (6, 6) and torch.equal(latent.w, latent.w[:1].expand(6, -1))
    assert torch.equal(project(drawer, distance, 0, print).w[0], some_w(drawer).mean(0))


def test_noise_maps_stay_white(drawer, distance):
    """Their mean is 0, their variance 1, and their neighbours tell nothing of each other."""
    latent, *_ = found(drawer, distance, 5)
    for each in latent.maps.values():
        assert each.mean().abs() < 1e-6 and each.square().mean().sub(1).abs() < 1e-5
    smooth = torch.linspace(-1, 1, 16).repeat(16, 1)
    assert correlation(smooth) > 100 * correlation(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))


def test_a_tuned_generator_draws_the_picture_at_the_same_latent(drawer, distance, critic, monkeypatch):
    monkeypatch.setattr(latents, "TUNING_RATE", 0.02)
    target = drawer.pictures([4])
    near = distance_from(target, by_discriminator(critic))
    latent, *_ = found(drawer, distance, 10)
    net = tuned(drawer.net, latent, target, near, 20, lambda *_: None)
    assert near(drawn(net, latent)) < near(drawn(drawer.net, latent)) / 2
    assert all(torch.equal(value, latent.maps[name]) for name, value in net.named_buffers() if name in latent.maps)
    assert torch.equal(net.mapping.fc0.weight, drawer.net.mapping.fc0.weight)


# ---- distances ----


@pytest.fixture(scope="module")
def vgg(tmp_path_factory):
    """Random weights of VGG-16, in the file that torchvision would have written."""
    path = tmp_path_factory.mktemp("vgg") / "vgg16.pth"
    torch.save(narrow_vgg.state16(64), path)
    return path


def pictures(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape))) * 2 - 1


def test_lpips_is_that_of_torchmetrics(vgg, monkeypatch):
    layers = models.vgg.make_layers(models.vgg.cfgs["D"])
    layers.load_state_dict({name.removeprefix("features."): each for name, each in torch.load(vgg).items()})
    monkeypatch.setattr(models, "vgg16", lambda weights: SimpleNamespace(features=layers))
    one, other = pictures(2, 3, 32, 32)
    wanted = _LPIPS(net="vgg", pnet_rand=True)(one[None], other[None]).item()
    distance = distance_from(other[None], by_lpips(vgg, torch.device("cpu")))
    assert wanted > 0 and distance(one[None]).item() == pytest.approx(wanted, rel=1e-5)
    assert distance(other[None]) == 0


def test_files_that_hold_no_vgg_are_refused(vgg, tmp_path):
    torch.save({"features.0.weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="does not hold VGG-16 as torchvision saves it"):
        by_lpips(tmp_path / "other.pth", torch.device("cpu"))
    with pytest.raises(UserError, match="cannot see pictures below 16 pixels"):
        by_lpips(vgg, torch.device("cpu"))(pictures(1, 3, 8, 8))


@pytest.fixture
def latent():
    torch.manual_seed(0)
    maps = {name: torch.randn_like(each) for name, each in noise_maps(generator()).items()}
    return Latent(torch.randn(6, 6), maps)


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), "cannot be read as a latent file"),
        (partial(torch.save, {"codes": torch.zeros(1)}), "me.pt' is damaged: it holds no latent; make one with"),
        (partial(torch.save, {"w": 1, "maps": []}), "it holds no latent"),
        (partial(torch.save, {"w": Path("x")}), "holds more than tensors and plain values"),
        (Path.unlink, "cannot be read as a latent file: No such file or directory; make one"),
    ],
)
def test_damaged_and_foreign_files_are_refused(latent, tmp_path, deed, said):
    path = tmp_path / "me.pt"
    latent.save(path)
    deed(path)
    with pytest.raises(UserError, match=said):
        Latent.load(path, generator())


@pytest.mark.parametrize("other", [generator(style=7), generator(size=32)])
def test_a_latent_of_another_network_is_refused(latent, tmp_path, other):
    latent.save(tmp_path / "me.pt")
    with pytest.raises(UserError, match="has styles of length 6 for 6 layers, and this network has"):
        Latent.load(tmp_path / "me.pt", other)


# ---- directions ----


def along(one, other):
    """Whether the rows are the same directions; either of two opposite vectors may be found."""
    return np.allclose(np.abs((one * other).sum(1)), 1, atol=1e-5)


def test_directions_by_weights_are_the_svd_of_the_affine_weights(drawer):
    state = drawer.net.state_dict()
    names = [f"synthesis.b{side}.conv{k}.affine.weight" for side in (4, 8, 16) for k in (0, 1) if side > 4 or k]
    _, values, wanted = np.linalg.svd(np.concatenate([state[name].numpy() for name in names]).astype(np.float64))
    assert np.diff(values).max() < -1e-3  # so there is one order of them
    found = F.normalize(directions(drawer, "weights")).numpy()
    assert along(found, wanted)
    assert (np.take_along_axis(found, np.abs(found).argmax(1)[:, None], 1) > 0).all()


def test_directions_by_pca_are_those_in_which_w_differ_most(drawer):
    known = some_w(drawer)
    values, vectors = np.linalg.eigh(np.cov(known.numpy().astype(np.float64).T))
    found = directions(drawer, "pca")
    assert along(F.normalize(found).numpy(), vectors.T[::-1])
    np.testing.assert_allclose(found.norm(dim=1).numpy(), np.sqrt(values[::-1]), rtol=1e-3)
