"""HiFi-GAN: weights that are computed from others (weight norm), and a learning rate that falls by epochs."""

import pytest
import torch
from torch.nn import functional as F

from gan.sound import Sound
from strategies import PhaseStrategy
from tests.ranks.test_games import hifigan, pictures
from tests.support.parity import equals, in_buckets, often, parts, train, trainer

STEPS = 2  # make matrix trains ten
PIECE = 2048  # bytes of a bucket: weights are gathered when they are read


@pytest.fixture(scope="module")
def alone():
    return train(hifigan, pictures, "single", steps=STEPS)


# ---- parity; `ddp`, and the control without synchronisation, are in test_games.py ----


@pytest.mark.parametrize("policy", often(["zero1", "zero2", "zero3"]))
def test_two_ranks_train_as_one(policy, ranks, alone):
    """`make matrix` tries its first step too."""
    equals(ranks(2).run(in_buckets, PIECE, train, hifigan, pictures, policy, 2, STEPS), alone)


# ---- the game ----


def test_the_losses_are_those_of_the_paper():
    """Written out: sums over the judges, least squares without a half, features of all layers and scores."""
    game, batch = hifigan().eval(), pictures(0, torch.float32)
    wave = batch["wave"]
    fake = game.voice(batch)
    ours, theirs = (game.discriminators(each) for each in (fake, wave))
    judged = game.judge(batch)
    for name in ("mpd", "msd"):
        pairs = zip(theirs[name], ours[name], strict=True)
        wanted = sum((real[-1] - 1).square().mean() + made[-1].square().mean() for real, made in pairs)
        torch.testing.assert_close(judged[name], wanted)
    losses = game.fool(batch)
    for name in ("mpd", "msd"):
        adversarial = sum((made[-1] - 1).square().mean() for made in ours[name])
        torch.testing.assert_close(losses[f"adversarial_{name}"], adversarial)
        layers = [pair for k in range(2) for pair in zip(ours[name][k], theirs[name][k], strict=True)]
        torch.testing.assert_close(losses[f"matching_{name}"], 2 * sum((a - b).abs().mean() for a, b in layers))
    torch.testing.assert_close(losses["mel"], 45 * F.l1_loss(game.mel(fake), game.mel(wave)))


def test_the_fake_is_made_once_a_step_and_the_judges_learn_first(monkeypatch):
    game, made = hifigan(), []
    forward = game.generator.forward
    monkeypatch.setattr(game.generator, "forward", lambda mel: made.append(mel) or forward(mel))
    trainer(PhaseStrategy("ddp"), 1, 3).fit(game, parts(3, batches=pictures))
    assert len(made) == 3
    assert [phase.name for phase in game.phases] == ["discriminators", "generator"]
    assert list(game.players) == ["generator", "discriminators"]


def test_it_shows_the_sounds_and_what_it_made_of_them():
    batch = pictures(0, torch.float32)
    shown = hifigan().eval().show(batch)
    assert list(shown) == ["real", "generated"]
    assert all(isinstance(each, Sound) and each.rate == 1000 for each in shown.values())
    assert torch.equal(shown["real"].samples, batch["wave"])
    assert shown["generated"].samples.shape == batch["wave"].shape
    assert not shown["generated"].samples.requires_grad
