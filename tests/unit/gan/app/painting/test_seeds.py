"""Pictures of seeds, from a file of published networks."""

import numpy as np
import pytest
import torch
from PIL import Image

from gan import sample
from gan.app.painting.grids import picture
from gan.app.painting.seeds import numbers
from gan.files.errors import UserError
from nets.published.from_noise import published
from nets.published.pickles import write
from nets.r3 import R3Generator
from nets.stylegan import StyleGenerator


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    nets = {
        "style": StyleGenerator(16, latent=5, style=6, mapping=2, base=64, most=8),
        "r3": R3Generator(5, (8, 4), classes=3),
    }
    nets["style"].mapping.w_avg.normal_()
    for name, net in nets.items():
        write(tmp_path / f"{name}.pkl", {"G_ema": published(net.eval())})
    return nets


def test_a_grid_has_the_picture_that_the_published_code_draws_of_each_seed(files, tmp_path):
    assert sample.main(["style.pkl", "--seeds", "3,7-8", "--truncation", "0.5", "--device", "cpu", "--singles"]) == 0
    z = torch.from_numpy(np.random.RandomState(7).randn(1, 5)).float()
    with torch.no_grad():
        wanted = np.asarray(picture(files["style"](z, psi=0.5)[0]))
    grid = np.asarray(Image.open("style-seeds.png"))
    assert grid.shape == (16, 48, 3) and np.array_equal(grid[:, 16:32], wanted)
    assert np.array_equal(np.asarray(Image.open("style-seeds/seed0007.png")), wanted)


def test_classes_are_drawn_in_turn_or_by_their_number(files):
    assert sample.main(["r3.pkl", "--seeds", "1", "--device", "cpu", "-o", "one.png"]) == 0
    assert sample.main(["r3.pkl", "--seeds", "1", "--class", "1", "--device", "cpu", "-o", "same.png"]) == 0
    assert sample.main(["r3.pkl", "--seeds", "1", "--class", "2", "--device", "cpu", "-o", "other.png"]) == 0
    one, same, other = (np.asarray(Image.open(f"{name}.png")) for name in ("one", "same", "other"))
    assert np.array_equal(one, same) and not np.array_equal(one, other)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["r3.pkl", "--truncation", "0.5"], "no truncation"),
        (["r3.pkl", "--class", "3"], "classes 0 to 2"),
        (["style.pkl", "--class", "0"], "no classes"),
        (["style.pkl", "--seeds", "8-3"], "no list"),
        (["missing.pkl"], "cannot read 'missing.pkl'"),
    ],
)
def test_what_cannot_be_drawn_is_said(files, capsys, words, said):
    assert sample.main([*words, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


def test_seeds_are_listed_as_in_the_published_code():
    assert numbers("0-3, 9,5") == [0, 1, 2, 3, 9, 5]
    for text in ("", "a", "1-", "-1", "0-99999", "1;2"):
        with pytest.raises(UserError, match="no list"):
            numbers(text)


def test_a_network_with_opacity_writes_transparent_pictures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = StyleGenerator(16, channels=4, latent=5, style=6, mapping=1, base=64, most=8)
    write(tmp_path / "clear.pkl", {"G_ema": published(net.eval())})
    assert sample.main(["clear.pkl", "--seeds", "0-1", "--device", "cpu", "--singles"]) == 0
    with torch.no_grad():
        z = torch.from_numpy(np.random.RandomState(1).randn(1, 5)).float()
        wanted = ((net(z)[0].clamp(-1, 1) + 1) * 127.5).round().byte().permute(1, 2, 0).numpy()
    one, grid = (np.asarray(Image.open(name)) for name in ("clear-seeds/seed0001.png", "clear-seeds.png"))
    assert np.array_equal(one, wanted) and np.array_equal(grid[:, 16:], wanted)
