"""A network that draws from seeds: of a run, or of a published file."""

import numpy as np
import pytest
import torch

import gan
from gan.app.drawing.drawer import MOST, Drawer
from gan.app.painting.reopen import open_run
from gan.files.errors import UserError
from nets.published.from_noise import published
from nets.published.pickles import write
from nets.r3 import R3Generator
from nets.stylegan import StyleGenerator
from tests.support import opening


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Tiny runs of games that draw from noise, by the names of their networks."""
    out = tmp_path_factory.mktemp("drawn")
    small = dict(size=16, width=4, faces=8, held_out=4, max_steps=1)
    return {name: opening.train(out, f"{name}-faces", **small) for name in ("stylegan", "wgan-gp")}


@pytest.fixture(params=["stylegan", "wgan-gp", "r3 file"])
def drawer(request, runs, tmp_path):
    torch.manual_seed(0)
    if request.param != "r3 file":
        drawer = Drawer.of_run(open_run(str(runs[request.param])))
    else:
        write(tmp_path / "r3.pkl", {"G": published(R3Generator(5, (8, 4), classes=3).eval())})
        drawer = Drawer.of_file(tmp_path / "r3.pkl", "cpu")
    drawer.net.double()
    return drawer


def test_a_seed_gives_the_same_picture_whatever_the_batch(drawer):
    seeds = [7, 3, *range(MOST + 2)]
    together = drawer.pictures(seeds)
    assert together.shape == (len(seeds), drawer.channels, *drawer.size)
    for row in (0, 1, 9, len(seeds) - 1):
        torch.testing.assert_close(drawer.pictures([seeds[row]]), together[row : row + 1])
    assert not torch.allclose(together[0], together[1])


def test_the_seeds_of_a_run_are_the_numbers_of_its_grids_and_scores(runs):
    opened = open_run(str(runs["wgan-gp"]))
    numbers = torch.tensor([5, 2])
    torch.testing.assert_close(
        Drawer.of_run(opened).pictures([5, 2]), opened.run.game.numbered(numbers, torch.zeros(2, 3, 16, 16))
    )


class Mirror(torch.nn.Module):
    """Its pictures are its latents."""

    latent = 4

    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones(()))

    def forward(self, z):
        return self.one * z.view(-1, 1, 2, 2)


def test_noise_between_two_seeds_is_as_long_as_theirs():
    drawer = Drawer(Mirror(), "mirror", lambda seed: torch.eye(4)[seed])
    halfway = drawer.between((0, 1), [0.5]).flatten()
    torch.testing.assert_close(halfway, torch.tensor([0.5, 0.5, 0, 0]).sqrt())


def test_truncation_pulls_to_the_mean_and_one_leaves_all_as_they_are(runs):
    drawer = gan.open(runs["stylegan"], device="cpu").drawer
    z = drawer.z([1, 2])
    whole, mean = drawer.w(z), drawer.mean_w.expand(2, drawer.layers, -1)
    assert torch.equal(drawer.w(z, psi=0), mean)
    part = drawer.w(z, psi=0, cutoff=2)
    assert torch.equal(part[:, :2], mean[:, :2]) and torch.equal(part[:, 2:], whole[:, 2:])
    torch.testing.assert_close(drawer.from_w(whole), drawer.pictures([1, 2]))


def test_the_noise_of_a_seed_is_the_same_in_each_picture(runs):
    drawer = gan.open(runs["stylegan"], device="cpu").drawer
    with torch.no_grad():
        for name, weight in drawer.net.named_parameters():
            if name.endswith("noise_strength"):
                weight.fill_(1.0)
    w = drawer.w(drawer.z([1, 2]))
    assert torch.equal(drawer.from_w(w, 5)[1:], drawer.from_w(w[1:], 5))
    kinds = [drawer.from_w(w[:1], grain) for grain in ("const", "none", 5, 6)]
    assert not any(torch.equal(a, b) for n, a in enumerate(kinds) for b in kinds[:n])


def test_a_published_file_draws_what_the_published_code_draws(tmp_path):
    net = StyleGenerator(16, latent=5, style=6, mapping=2, base=64, most=8, classes=2).eval()
    write(tmp_path / "style.pkl", {"G_ema": published(net)})
    z = torch.from_numpy(np.stack([np.random.RandomState(seed).randn(5) for seed in (4, 7)])).float()
    with torch.no_grad():
        wanted = net(z, torch.eye(2), psi=0.5, cutoff=3)
    torch.testing.assert_close(
        gan.open(tmp_path / "style.pkl", "cpu").drawer.pictures([4, 7], truncation=0.5, cutoff=3), wanted
    )


def test_gradients_reach_what_is_drawn_from(runs):
    drawer = gan.open(runs["stylegan"], device="cpu").drawer
    w = drawer.w(drawer.z([1])).requires_grad_()
    drawer.from_w(w).sum().backward()
    assert w.grad.abs().amax((0, 2)).all()


def test_what_cannot_be_drawn_is_said(runs, sean_run, tmp_path):
    drawer = Drawer.of_run(open_run(str(runs["wgan-gp"])))
    with pytest.raises(UserError, match="no styles to truncate"):
        drawer.pictures([0], truncation=0.5)
    with pytest.raises(UserError, match="take a run of StyleGAN2"):
        drawer.w(drawer.z([0]))
    with pytest.raises(UserError, match="does not draw from noise; type"):
        Drawer.of_run(open_run(str(sean_run)))


def test_games_are_opened_as_what_they_can_do(runs, sean_run):
    (picture,) = gan.open(runs["wgan-gp"], device="cpu").sample([3])
    assert picture.size == (16, 16)
    assert gan.open(sean_run, device="cpu").painter.size == (32, 32)
