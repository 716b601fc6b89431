"""pix2pix on pairs: networks by name and size, lengths, and published weights to begin with."""

import pytest
import torch

from gan.files.errors import UserError
from gan.games.pix2pix import down_by_epochs, half_then_down
from gan.runs import build
from gan.runs.sides import unet_depth
from nets.discriminator import PixelGan
from nets.resnet import ResnetGenerator, UNet
from tests.unit.gan.runs.test_sides import fill

TINY = dict(width=2, judge_width=2, layers=1, workers=0, held_out=0.0)


@pytest.fixture
def pairs(tmp_path):
    fill(tmp_path / "pairs", "A", "B", size=(16, 16))
    return str(tmp_path / "pairs")


@pytest.mark.parametrize(
    ("size", "name", "depth"),
    [
        ((256, 256), "unet", 8),
        ((512, 512), "unet", 9),
        ((64, 96), "unet", 5),
        ((8, 8), "unet", 3),
        ((256, 512), "unet_128", 7),
        ((256, 256), "unet_256", 8),
    ],
)
def test_a_u_net_halves_as_often_as_the_size_allows_or_its_name_says(size, name, depth):
    assert unet_depth(size, name) == depth


@pytest.mark.parametrize(
    ("size", "name", "fits"),
    [((100, 300), "unet", "304x96"), ((64, 64), "unet_256", "256x256"), ((9, 9), "unet", "8x8")],
)
def test_a_size_that_cannot_be_halved_is_refused_with_one_that_can(size, name, fits):
    with pytest.raises(UserError, match=rf"type --size {fits}, or another --network"):
        unet_depth(size, name)


def test_networks_losses_and_directions_are_typed(pairs):
    game = build("pix2pix", data=pairs, **TINY).game
    assert isinstance(game.generator, UNet) and game.generator.depth == 4
    typed = dict(network="resnet_6blocks", judge="pixel", loss="wgangp", norm="instance", direction="BtoA")
    run = build("pix2pix", data=pairs, channels=1, **typed, **TINY)
    assert isinstance(run.game.generator, ResnetGenerator) and isinstance(run.game.discriminator, PixelGan)
    assert run.game.loss == "wgangp"
    batch = next(iter(run.data.train_dataloader()))
    assert batch["a"].shape == (1, 1, 16, 16) and batch["a"].mean() > batch["b"].mean()  # B is brighter
    assert not run.scores  # nothing is held out


def test_the_length_is_the_published_one_or_typed(pairs):
    run = build("pix2pix", data=pairs, **TINY)
    assert run.max_steps == 200 * 8
    assert run.game.decay.keywords["lr_lambda"].func is down_by_epochs
    run = build("pix2pix", data=pairs, batch_size=4, epochs=3, falling_epochs=1, **TINY)
    assert run.max_steps == 4 * 2 and run.batch_size == 4
    run = build("pix2pix", data=pairs, max_steps=7, **TINY)
    assert run.max_steps == 7 and run.game.decay.keywords["lr_lambda"].func is half_then_down


def test_published_weights_are_begun_with(pairs, tmp_path, capsys):
    other = build("pix2pix", data=pairs, seed=1, **TINY).game
    torch.save(other.generator.state_dict(), tmp_path / "edges2shoes.pth")
    game = build("pix2pix", data=pairs, from_=str(tmp_path / "edges2shoes.pth"), **TINY).game
    one, two = other.generator.state_dict(), game.generator.state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert "weights: edges2shoes.pth of" in capsys.readouterr().err
