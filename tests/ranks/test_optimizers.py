"""Optimizers with train() and eval(), and those that look at whole weights: what validations and checkpoints have, and
what ranks hold and move; how they train: tests/scenes/optimizers.py."""

from typing import ClassVar

import pytest
from torch import nn
from torch.utils.data import DataLoader

from strategies import PhaseStrategy
from tests.scenes.optimizers import SHAMPOO, Free, FreeByHand
from tests.support.duel import fit
from tests.support.hard_games import One
from tests.support.parity import BROKEN, EXACT, distance, often, on, parts, trainer, vectors
from tests.support.saved import read_checkpoint
from tests.support.watch import looked, moved

STEPS = 4


@pytest.fixture(scope="module")
def by_hand():
    return FreeByHand().run(STEPS)


# ---- two kinds of weights ----


def validated(policy, world, every):
    """Weights after a training, and the judge's as the last validation has seen them."""
    game, strategy = Free(), PhaseStrategy(policy, check=False)
    batches = DataLoader([{name: value[:2] for name, value in vectors(0).items()}], batch_size=None)
    game.val_dataloader = lambda: batches
    settings = dict(val_check_interval=every, num_sanity_val_steps=0) if every else dict(limit_val_batches=0)
    trainer(strategy, world, STEPS, check_val_every_n_epoch=None, **settings).fit(game, parts(STEPS, world))
    return {name: value.clone() for name, value in game.state_dict().items()}, getattr(game, "seen", None)


@pytest.mark.parametrize(("policy", "world"), often([("single", 1), ("ddp", 2), ("zero1", 2)], ["zero1"]))
def test_a_validation_sees_the_average_and_changes_no_bit(policy, world, ranks, by_hand):
    play = on(ranks, world)
    undisturbed = play(validated, policy, world, None)
    for (weights, seen), (expected, _) in zip(play(validated, policy, world, 2), undisturbed, strict=True):
        assert distance(weights, expected) == 0
        average = {name: by_hand[f"ema judge.{name}"] for name in seen}
        assert distance(seen, average) < EXACT
        assert distance(seen, {name: weights[f"judge.{name}"] for name in seen}) > BROKEN


def test_a_checkpoint_has_the_average(ranks, by_hand, tmp_path):
    path = str(tmp_path / "end.ckpt")
    ranks(2).run(fit, Free, "zero1", 2, STEPS, path)
    saved = read_checkpoint(path)["players"]["judge"]["ema"]
    assert distance(saved, {name: by_hand[f"ema judge.{name}"] for name in saved}) < EXACT
    # An evaluation of the checkpoint, which makes no optimizer, has it too.
    game = Free()
    batches = DataLoader([vectors(0)], batch_size=None)
    trainer(PhaseStrategy("single"), 1, 1).validate(game, batches, ckpt_path=path)
    assert distance(game.seen, saved) == 0


# ---- whole weights ----


class Layers(One):
    of_net: ClassVar = {"optimizer": SHAMPOO, "ema": 0.9}

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(8)))


def held(strategy, _):
    """How many numbers the optimizer and the average hold."""
    policy = strategy.policies["net"]
    states = map(policy.optimizer.state.get, policy.storage.owned.values())
    factors = [factor for state in states for factor in state["factors"]]
    return sum(t.numel() for t in factors), sum(t.numel() for t in policy.ema.average)


def test_state_and_average_are_shared_out(ranks):
    numbers = 8 * 36
    assert ranks(4).run(looked, held, Layers, "zero1", 4, 2) == [(2 * numbers / 4, numbers / 4)] * 4


def test_an_update_moves_each_weight_once(ranks):
    exact = 8 * 8 * 36  # bytes
    step, _, collectives = ranks(2).run(moved, Layers, "zero1", 2, 3)[0][-1]
    assert step == 2
    assert collectives == [("allreduce_", exact), ("broadcast_", exact / 2), ("broadcast_", exact / 2)]
