"""What averages and schedules count: updates, steps or epochs. As in a loop by hand, also after a resume."""

from functools import partial
from typing import ClassVar

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from gan import Phase
from tests.support.duel import ENGINES, POLICIES, ByHand, Duel, fit, of, played
from tests.support.parity import BROKEN, EXACT, distance, often
from tests.support.saved import read_checkpoint, write_checkpoint

EPOCH = 4
EPOCHS = {"limit_train_batches": EPOCH, "max_epochs": 10}


def warm(updates: int) -> float:
    return min(0.8, (1 + updates) / (10 + updates))


falling = partial(LambdaLR, lr_lambda=lambda number: 0.8**number)


class Counting(Duel):
    """The judge has more updates than there are steps, the generator fewer."""

    of_judge: ClassVar = {"ema": warm, "schedule": falling, "schedule_per": "step"}
    of_generator: ClassVar = {"ema": warm, "ema_per": "step", "schedule": falling, "schedule_per": "epoch"}

    def configure_phases(self):
        yield Phase("judge", self.judging, "judge")
        yield Phase("fool", self.fooling, "generator", every=2)
        yield Phase("again", self.judging, "judge", every=3)


class CountingByHand(ByHand):
    def __init__(self):
        super().__init__()
        self.averages = {name: [w.detach().clone() for w in net.parameters()] for name, net in self.networks.items()}
        self.counts = dict.fromkeys(self.networks, 0)

    def due(self, turn, step):
        return turn == "judge" or step % (2 if turn == "fool" else 3) == 0

    def average(self, name):
        decay = warm(self.counts[name])
        self.counts[name] += 1
        for average, (key, weight) in zip(self.averages[name], self.networks[name].named_parameters(), strict=True):
            average.mul_(decay).add_(weight, alpha=1 - decay)
            self.kept[f"ema {name}.{key}"] = average

    def updated(self, name):
        if name == "judge":
            self.average(name)

    def after(self, step):
        self.average("generator")
        for name, number in (("judge", step + 1), ("generator", (step + 1) // EPOCH)):
            self.optimizers[name].param_groups[0]["lr"] = 2e-2 * 0.8**number
            self.kept[f"rate {name}"] = torch.tensor(2e-2 * 0.8**number)


@pytest.fixture(scope="module")
def by_hand():
    return CountingByHand().run()


WORLDS = often({**POLICIES, **ENGINES}.items())


@pytest.mark.parametrize(("policy", "world"), WORLDS)
def test_averages_and_schedules_count_what_they_say(policy, world, ranks, by_hand):
    assert distance(of(played(ranks, Counting, policy, world, **EPOCHS), by_hand), by_hand) < EXACT


def changed(player, **words):
    before = getattr(Counting, player)
    return type("Control", (Counting,), {player: {**before, **words}})


@pytest.mark.parametrize(
    "control",
    [
        changed("of_judge", ema=0.8),
        changed("of_generator", ema_per="update"),
        changed("of_judge", schedule_per="update"),
        changed("of_generator", schedule_per="step"),
        changed("of_judge", schedule_per="epoch"),
    ],
)
def test_the_control_that_counts_something_else_is_another_training(control, by_hand):
    assert distance(of(fit(control, "single", 1, **EPOCHS), by_hand), by_hand) > BROKEN


# ---- saved and resumed ----

HALF = 6  # in the middle of an epoch


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "world"), [("single", 1), ("zero3", 2)])
def test_the_counts_are_resumed_bit_for_bit(policy, world, ranks, tmp_path):
    unbroken = played(ranks, Counting, policy, world, **EPOCHS)
    played(ranks, Counting, policy, world, steps=HALF, save=str(tmp_path / "half.ckpt"), **EPOCHS)
    resumed = played(ranks, Counting, policy, world, resume=str(tmp_path / "half.ckpt"), **EPOCHS)
    assert distance(resumed, unbroken) == 0


@pytest.mark.slow
def test_they_travel_between_policies_and_the_control_without_them_arrives_elsewhere(ranks, by_hand, tmp_path):
    played(ranks, Counting, "zero3", 2, steps=HALF, save=str(tmp_path / "half.ckpt"), **EPOCHS)
    arrived = played(ranks, Counting, "zero1", 4, resume=str(tmp_path / "half.ckpt"), **EPOCHS)
    assert distance(of(arrived, by_hand), by_hand) < EXACT
    tree = read_checkpoint(tmp_path / "half.ckpt")
    assert [tree["players"][name]["ema_updates"] for name in ("judge", "generator")] == [HALF + 2, HALF]
    for player in tree["players"].values():
        del player["ema_updates"]  # as in a checkpoint of an earlier version
    write_checkpoint(tmp_path / "older.ckpt", tree)
    older = fit(Counting, "single", 1, resume=str(tmp_path / "older.ckpt"), **EPOCHS)
    weights = {name: value for name, value in by_hand.items() if not name.startswith("ema ")}
    assert distance(of(older, weights), weights) < EXACT
    assert distance(of(older, by_hand), by_hand) > BROKEN
