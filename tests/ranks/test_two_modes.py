"""Optimizers with train() and eval(): a validation and a checkpoint have the average. tests/scenes/optimizers.py has
that they train as a loop by hand."""

import pytest
import torch
from torch.utils.data import DataLoader

from strategies import PhaseStrategy
from tests.scenes.optimizers import Free, FreeByHand
from tests.support.duel import played
from tests.support.parity import BROKEN, EXACT, distance, often, trainer, vectors
from tests.support.saved import read_checkpoint

STEPS = 8


@pytest.fixture(scope="module")
def by_hand():
    return FreeByHand().run(STEPS)


# ---- validation ----


def validated(policy, world, every):
    """Weights after a training, and the judge's as the last validation has seen them."""
    game, strategy = Free(), PhaseStrategy(policy, check=False)
    batches = DataLoader([{name: value[:2] for name, value in vectors(0).items()}], batch_size=None)
    game.val_dataloader = lambda: batches
    settings = dict(val_check_interval=every, num_sanity_val_steps=0) if every else dict(limit_val_batches=0)
    rank = torch.distributed.get_rank() if world > 1 else 0
    parts = DataLoader([{"x": vectors(step)["x"].chunk(world)[rank]} for step in range(STEPS)], batch_size=None)
    trainer(strategy, world, STEPS, check_val_every_n_epoch=None, **settings).fit(game, parts)
    return {name: value.clone() for name, value in game.state_dict().items()}, getattr(game, "seen", None)


@pytest.mark.parametrize(("policy", "world"), often([("single", 1), ("ddp", 2), ("zero1", 2)], ["single", "zero1"]))
def test_a_validation_sees_the_average_and_changes_no_bit(policy, world, ranks, by_hand):
    play = ranks(world).run if world > 1 else lambda function, *args: [function(*args)]
    undisturbed = play(validated, policy, world, None)
    for (weights, seen), (expected, _) in zip(play(validated, policy, world, 2), undisturbed, strict=True):
        assert distance(weights, expected) == 0
        average = {name: by_hand[f"ema judge.{name}"] for name in seen}
        assert distance(seen, average) < EXACT
        assert distance(seen, {name: weights[f"judge.{name}"] for name in seen}) > BROKEN


# ---- checkpoints ----


def test_a_checkpoint_has_the_average(ranks, by_hand, tmp_path):
    path = str(tmp_path / "end.ckpt")
    played(ranks, Free, "zero1", 2, steps=STEPS, save=path)
    saved = read_checkpoint(path)["players"]["judge"]["ema"]
    assert distance(saved, {name: by_hand[f"ema judge.{name}"] for name in saved}) < EXACT
    # An evaluation of the checkpoint, which makes no optimizer, has it too.
    game = Free()
    batches = DataLoader([vectors(0)], batch_size=None)
    trainer(PhaseStrategy("single"), 1, 1).validate(game, batches, ckpt_path=path)
    assert distance(game.seen, saved) == 0
