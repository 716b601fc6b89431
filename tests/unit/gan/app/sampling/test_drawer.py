"""A network that draws from seeds: of a run, or of a published file."""

import pytest
import torch

import gan
from gan import sample
from gan.app.run.reopen import open_run
from gan.app.sampling.drawer import MOST, Drawer
from gan.files.errors import UserError
from gan.games.from_noise import noise_of
from nets.biggan import BigDiscriminator, BigGenerator
from nets.r3 import R3Generator
from tests.support import drawers, opening


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Tiny runs of games that draw from noise, by the names of their networks."""
    out = tmp_path_factory.mktemp("drawn")
    return {name: opening.train(out, f"{name}-faces", **drawers.SMALL) for name in ("stylegan", "wgan-gp")}


@pytest.fixture(params=["stylegan", "wgan-gp", "r3 file"])
def drawer(request, runs, tmp_path):
    torch.manual_seed(0)
    if request.param != "r3 file":
        drawer = Drawer.of_run(open_run(str(runs[request.param])))
    else:
        drawer = Drawer.of_networks(drawers.publish(tmp_path / "r3.pkl", G=R3Generator(5, (8, 4), classes=3)), "cpu")
    drawer.net.double()
    return drawer


def test_a_seed_gives_the_same_picture_whatever_the_batch(drawer):
    seeds = [7, 3, *range(MOST + 2)]
    together = drawer.pictures(seeds)
    assert together.shape == (len(seeds), drawer.channels, *drawer.size)
    for row in (0, 1, 9, len(seeds) - 1):
        torch.testing.assert_close(drawer.pictures([seeds[row]]), together[row : row + 1])
    assert not torch.allclose(together[0], together[1])


class Mirror(torch.nn.Module):
    """Its pictures are its latents."""

    latent = 4

    def __init__(self):
        super().__init__()
        self.one = torch.nn.Parameter(torch.ones(()))

    def forward(self, z):
        return self.one * z.view(-1, 1, 2, 2)


def test_noise_between_two_seeds_is_as_long_as_theirs():
    drawer = Drawer(Mirror(), "mirror", latent_of=lambda seed, length: torch.eye(length)[seed])
    halfway = drawer.between((0, 1), [0.5]).flatten()
    torch.testing.assert_close(halfway, torch.tensor([0.5, 0.5, 0, 0]).sqrt())


# ---- BigGAN's files ----

SHARED = dict(size=(64, 64), latent=25, classes=3, shared=4, hierarchical=True, attention=[16], channels=4)


@pytest.mark.parametrize("rule", [dict(latent=6), dict(latent=6, classes=3), SHARED])
def test_a_published_file_of_biggan_draws_alone(rule, tmp_path):
    torch.manual_seed(0)
    net = BigGenerator(width=2, **rule).eval()
    torch.save({f"module.{name}": value for name, value in net.state_dict().items()}, tmp_path / "G_ema.pth")
    drawer = gan.open(tmp_path / "G_ema.pth", device="cpu").drawer
    labels = torch.eye(3)[[1, 2]] if net.classes else None
    wanted = net(torch.stack([noise_of(seed, net.latent) for seed in (1, 2)]), labels)
    assert torch.equal(drawer.pictures([1, 2]), wanted) and drawer.channels == net.channels


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            BigDiscriminator(width=2).state_dict(),
            "has not the weights of .* or BigGAN, or VQGAN's autoencoder .'blocks.0.0.bn1.gain.weight'",
        ),
        ({"Zencoder.model.1.weight": torch.zeros(1)}, "other networks are for gan.fit --from$"),
    ],
)
def test_what_is_no_generator_is_refused(state, words, tmp_path):
    torch.save(state, tmp_path / "latest_net_G.pth")
    with pytest.raises(UserError, match=words):
        gan.open(tmp_path / "latest_net_G.pth", device="cpu")


def test_standing_statistics_are_means_over_batches_and_change_nothing_else(tmp_path, runs):
    torch.save(BigGenerator(width=2, latent=6, classes=3).state_dict(), tmp_path / "G_ema.pth")
    drawer = gan.open(tmp_path / "G_ema.pth", device="cpu").drawer
    drawer.net.double()
    norm, seen = drawer.net.output_layer[0], []
    norm.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    before = {name: value.clone() for name, value in drawer.net.state_dict().items()}
    drawer.stand(3)
    assert len(seen) == 3 and not torch.equal(seen[0], seen[1])
    torch.testing.assert_close(norm.stored_mean, torch.stack([x.mean((0, 2, 3)) for x in seen]).mean(0))
    torch.testing.assert_close(norm.stored_var, torch.stack([x.var((0, 2, 3)) for x in seen]).mean(0))
    moved = {name for name, value in drawer.net.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.rpartition(".")[2] for name in moved} == {"stored_mean", "stored_var"}
    assert not any(module.training for module in drawer.net.modules())
    typed = ["--seeds", "0", "--standing", "2", "-o", str(tmp_path / "a.png")]
    assert sample.main([str(tmp_path / "G_ema.pth"), *typed]) == 0
    assert sample.main([str(runs["wgan-gp"]), *typed]) == 2
