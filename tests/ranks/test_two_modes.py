"""Optimizers with train() and eval(): both kinds of weights are where their authors want them, under each policy."""

from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from strategies import PhaseStrategy
from strategies.policies.modes import EvalWeights
from tests.support.duel import ByHand, Duel, of, played
from tests.support.parity import BROKEN, EXACT, distance, refused, trainer, vectors
from tests.support.saved import read_checkpoint
from tests.support.schedule_free import ScheduleFree

STEPS, HALF = 8, 4
POLICIES = {"single": 1, "ddp": 2, "zero1": 4, "generator=zero1,*=ddp": 2}


class Free(Duel):
    """It keeps what a validation sees."""

    def configure_players(self):
        for player in super().configure_players():
            yield replace(player, optimizer=ScheduleFree)

    def validation_step(self, batch):
        self.seen = {name: weight.detach().clone() for name, weight in self.judge.named_parameters()}


class FreeByHand(ByHand):
    """With the average computed from its definition: x moves to z by 1 / k."""

    moments = ("z",)
    make_optimizer = ScheduleFree

    def __init__(self):
        super().__init__()
        for optimizer in self.optimizers.values():
            optimizer.train()
        self.x = {name: [w.detach().clone() for w in net.parameters()] for name, net in self.networks.items()}

    def updated(self, name):
        optimizer, names = self.optimizers[name], [key for key, _ in self.networks[name].named_parameters()]
        k = optimizer.param_groups[0]["k"]
        for key, x, weight in zip(names, self.x[name], self.networks[name].parameters(), strict=True):
            x.lerp_(optimizer.state[weight]["z"], 1 / k)
            self.kept[f"ema {name}.{key}"] = x


@pytest.fixture(scope="module")
def by_hand():
    return FreeByHand().run(STEPS)


@pytest.mark.parametrize("policy", POLICIES)
def test_it_trains_as_a_loop_by_hand(policy, ranks, by_hand):
    found = played(ranks, Free, policy, POLICIES[policy], steps=STEPS, check=False)
    assert distance(of(found, by_hand), by_hand) < EXACT


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


@pytest.mark.parametrize(("policy", "world"), [("single", 1), ("ddp", 2), ("zero1", 2)])
def test_a_validation_sees_the_average_and_changes_no_bit(policy, world, ranks, by_hand):
    play = ranks(world).run if world > 1 else lambda function, *args: [function(*args)]
    undisturbed = play(validated, policy, world, None)
    for (weights, seen), (expected, _) in zip(play(validated, policy, world, 2), undisturbed, strict=True):
        assert distance(weights, expected) == 0
        average = {name: by_hand[f"ema judge.{name}"] for name in seen}
        assert distance(seen, average) < EXACT
        assert distance(seen, {name: weights[f"judge.{name}"] for name in seen}) > BROKEN


@contextmanager
def careless(self):
    self.optimizer.eval()
    yield
    self.optimizer.train()


@contextmanager
def deaf(self):
    yield


def test_the_controls_that_compute_weights_back_or_never_change_differ():
    expected, _ = validated("single", 1, None)
    with mock.patch.object(EvalWeights, "swapped", careless):
        assert 0 < distance(validated("single", 1, 2)[0], expected) < EXACT
    with mock.patch.object(EvalWeights, "swapped", deaf):
        weights, seen = validated("single", 1, 2)
    assert distance(seen, {name: weights[f"judge.{name}"] for name in seen}) == 0


# ---- checkpoints ----


@pytest.mark.parametrize("policy", ["single", "ddp", "zero1"])
def test_it_resumes_bit_for_bit(policy, ranks, tmp_path):
    path, world = str(tmp_path / "half.ckpt"), 1 if policy == "single" else 2
    unbroken = played(ranks, Free, policy, world, steps=STEPS)
    played(ranks, Free, policy, world, steps=HALF, save=path)
    assert distance(played(ranks, Free, policy, world, steps=STEPS, resume=path), unbroken) == 0


def test_a_checkpoint_goes_from_policy_to_policy_and_has_the_average(ranks, by_hand, tmp_path):
    path = None
    for step, (policy, world) in enumerate([("zero1", 4), ("single", 1), ("zero1", 2), ("ddp", 2)], STEPS - 3):
        before, path = path, str(tmp_path / f"{step}.ckpt")
        arrived = played(ranks, Free, policy, world, steps=step, save=path, resume=before)
    assert distance(of(arrived, by_hand), by_hand) < EXACT
    saved = read_checkpoint(path)["players"]["judge"]["ema"]
    assert distance(saved, {name: by_hand[f"ema judge.{name}"] for name in saved}) < EXACT
    # An evaluation of the checkpoint, which makes no optimizer, has it too.
    game = Free()
    batches = DataLoader([vectors(0)], batch_size=None)
    trainer(PhaseStrategy("single"), 1, 1).validate(game, batches, ckpt_path=path)
    assert distance(game.seen, saved) == 0


# ---- refusals ----


class Averaged(Free):
    of_judge: ClassVar = {"ema": 0.9}


@pytest.mark.parametrize(
    ("game", "policy", "words"),
    [
        (
            Averaged,
            "ddp",
            "player 'judge': ScheduleFree keeps an average itself, which its eval() shows",
        ),
        (Free, "zero3", "type --strategy generator=zero1,*=zero3"),
        (Free, "fsdp", "type --strategy generator=zero1,*=fsdp"),
    ],
)
def test_what_does_not_fit_is_refused(game, policy, words, ranks):
    for message in ranks(2).run(refused, game, policy=policy, world=2, steps=1):
        assert words in message
