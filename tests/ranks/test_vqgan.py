"""What is particular to VQGAN; that it learns, shows and scores, and is the same on ranks: see test_games.py."""

import pytest
import torch

from gan.games.vqgan import VqGan
from strategies import PhaseStrategy
from tests.ranks.test_games import pictures, vqgan
from tests.support.parity import parts, trainer


def test_the_codebook_moves_in_every_step_once():
    """That it is the same on all ranks: test_scenes.py."""
    game = vqgan()
    moved = []
    follow = game.autoencoder.quantize.follow
    game.autoencoder.quantize.follow = lambda *rows: moved.append(game.step) or follow(*rows)
    trainer(PhaseStrategy("single"), 1, 5).fit(game, parts(5, batches=pictures))
    assert moved == list(range(5))


def test_the_turn_goes_back_through_the_discriminator_once(monkeypatch):
    """For the adaptive weight and for the learning together."""
    monkeypatch.setattr(VqGan, "joined", True)
    game, passes = vqgan().double(), []
    game.discriminator.register_forward_hook(lambda *found: found[2].register_hook(passes.append) and None)
    sum(game.paint(pictures(0)).values()).backward()
    assert len(passes) == 1 and game.autoencoder.encoder.conv_in.weight.grad.abs().sum() > 0


def test_the_adaptive_weight_is_bounded():
    game, batch = vqgan().double(), pictures(0)
    painted = game.autoencoder(batch["image"])[0]
    assert game.balance(painted.mean(), 1e-9 * painted.mean()) == 1e4


def test_idle_codes_are_counted(monkeypatch):
    """Codes 0 and 1 as often as each other: of 40 codes, 38 are idle."""
    game, found = vqgan(), {}
    monkeypatch.setattr(game, "log", lambda name, value, **_: found.update({name: float(value)}))
    monkeypatch.setattr(game, "all_gather", lambda value: value)
    numbers = torch.arange(32).view(2, 4, 4) % 2
    monkeypatch.setattr(game.autoencoder, "forward", lambda image: (image, None, numbers))
    with torch.no_grad():
        game.validation_step({"image": torch.zeros(2, 3, 16, 16)})
    game.on_validation_epoch_end()
    assert found["val/idle_codes"] == pytest.approx(38 / 40)
