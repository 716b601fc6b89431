"""A resumed training whose optimizers and schedules are made otherwise than before."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, RMSprop
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from gan import Player
from gan.files.errors import UserError
from strategies import PhaseStrategy, private
from strategies.checkpoint.player_state import load_rest, rest_of_state
from tests.support.hard_games import One, Plain
from tests.support.parity import Whole, distance, snapshot, trainer
from tests.support.saved import read_checkpoint, write_checkpoint

ADAM, SLOW, STEPS_OF_2 = partial(Adam, lr=1e-2), partial(Adam, lr=1e-4), partial(StepLR, step_size=2)


class Made(Plain):
    """A game with these functions for its generator; a hook may move its learning rate."""

    def __init__(self, optimizer=ADAM, schedule=None, factor=1.0):
        super().__init__()
        self.optimizer, self.schedule, self.factor = optimizer, schedule, factor

    def configure_players(self):
        yield Player("generator", self.generator, self.optimizer, self.schedule)
        yield Player("discriminator", self.discriminator, ADAM)

    def on_train_batch_end(self, *_):
        for group in self.trainer.strategy.optimizers[0].param_groups:
            group["lr"] *= self.factor


@pytest.fixture
def goes_on(tmp_path, monkeypatch):
    """The groups and the weights of a second game that goes on from a first one's checkpoint, and what is said."""

    def trained(game, steps, resumed=None):
        made = trainer(PhaseStrategy("single", check=False), 1, steps)
        made.fit(game, Whole(steps), ckpt_path=resumed)
        groups = [dict(group) for group in made.strategy.optimizers[0].param_groups]
        return made, groups, snapshot(game, made.strategy)

    def run(first, second, change=None):
        heard = []
        trained(first, 4)[0].save_checkpoint(tmp_path / "x.ckpt")
        if change is not None:
            tree = read_checkpoint(tmp_path / "x.ckpt")
            change(tree)
            write_checkpoint(tmp_path / "x.ckpt", tree)
        monkeypatch.setattr(private, "say", heard.append)
        return *trained(second, 6, str(tmp_path / "x.ckpt"))[1:], heard

    run.unbroken = lambda game: trained(game, 6)[1:]
    return run


def said(what):
    return [f"player 'generator' goes on with its {what} of now, in place of the checkpoint's"] if what else []


def two(rate, weights):
    return Adam([{"params": weights[:2]}, {"params": weights[2:], "lr": 1e-3}], lr=rate)


class Lowered(Made):
    """As start/patterns.md has it in place of ReduceLROnPlateau."""

    def __init__(self, optimizer):
        super().__init__(optimizer, partial(LambdaLR, lr_lambda=lambda _: self.lowered))
        self.lowered = 1.0

    def on_train_batch_end(self, *_):
        self.lowered = 0.5 if self.step >= 2 else 1.0


def cycling(momentum):
    """OneCycleLR moves the momentum, which is least after six steps."""
    return Made(partial(SGD, lr=1e-2, momentum=momentum), partial(OneCycleLR, max_lr=1, total_steps=20, pct_start=0.35))


OTHER = dict(lr=1e-4, betas=(0.5, 0.9), weight_decay=0.1)
NUMBERS = {  # made before, made now, what the groups have in the end, and what is said
    "several": (Made(), Made(partial(Adam, **OTHER)), [OTHER], "lr, betas, weight_decay"),
    "of groups": (Made(partial(two, 1e-2)), Made(partial(two, 1e-4)), [dict(lr=1e-4), dict(lr=1e-3)], "lr"),
    "a hook has moved it": (Made(factor=0.5), Made(SLOW, factor=0.5), [dict(lr=1e-4 * 0.5**6)], "lr"),
    "by what the game remembers": (Lowered(ADAM), Lowered(SLOW), [dict(lr=5e-5)], "lr, LambdaLR"),
    "a schedule has moved it": (cycling(0.9), cycling(0.8), [dict(momentum=0.85)], ""),
    "how it computes": [Made(partial(ADAM, fused=fused)) for fused in (True, False)] + [[dict(fused=True)], ""],
}


@pytest.mark.promise("`--resume` with other settings, or from another folder")
@pytest.mark.parametrize("name", NUMBERS)
def test_the_numbers_that_are_made_now_count_and_are_said_unless_training_has_moved_them(name, goes_on):
    before, now, wanted, words = NUMBERS[name]
    groups, _, heard = goes_on(before, now)
    for group, numbers in zip(groups, wanted, strict=True):
        assert [group[key] for key in numbers] == [pytest.approx(value) for value in numbers.values()]
    assert heard == said(words)


def test_a_checkpoint_of_an_earlier_version_keeps_its_numbers(goes_on):
    def forget(tree):
        for state in tree["optimizer_states"]:
            del state["made"]

    groups, _, heard = goes_on(Made(), Made(SLOW), forget)
    assert (groups[0]["lr"], heard) == (1e-2, [])


class ChannelsLast(One):
    """Its weights lie channels last."""

    def __init__(self, fused):
        super().__init__()
        self.net = nn.Sequential(nn.Unflatten(1, (3, 1, 2)), nn.Conv2d(3, 4, (1, 2)))
        self.net.to(memory_format=torch.channels_last)
        self.of_net = {"optimizer": partial(ADAM, fused=fused)}


SAME = [partial(Made, **how) for how in ({}, {"schedule": STEPS_OF_2}, {"factor": 0.5})]
FUSED, PLAIN = (partial(ChannelsLast, fused) for fused in (True, False))


@pytest.mark.parametrize(("before", "now"), [*zip(SAME, SAME, strict=True), (FUSED, PLAIN), (PLAIN, FUSED)])
def test_where_nothing_is_made_otherwise_training_is_the_unbroken_one(before, now, goes_on):
    _, weights, heard = goes_on(before(), now())
    assert distance(weights, goes_on.unbroken(before())[1]) == 0
    assert heard == []


# ---- schedules ----


def warm(steps, optimizer):
    parts = [LinearLR(optimizer, 0.1, total_iters=steps), ExponentialLR(optimizer, 0.9)]
    return SequentialLR(optimizer, parts, [steps])


def chained(gamma, optimizer):
    return ChainedScheduler([LinearLR(optimizer, 0.1, total_iters=3), ExponentialLR(optimizer, gamma)])


def in_tensor(rate, weights):
    return Adam(weights, lr=torch.tensor(rate))


INVERSE, STEPS_OF_4 = partial(LambdaLR, lr_lambda=lambda update: 1 / (1 + update)), partial(StepLR, step_size=4)
SCHEDULES = {
    "StepLR": [Made(schedule=each) for each in (STEPS_OF_2, partial(StepLR, step_size=3, gamma=0.5))],
    "CosineAnnealingLR": [Made(schedule=partial(CosineAnnealingLR, T_max=each)) for each in (4, 8)],
    "OneCycleLR": [Made(schedule=partial(OneCycleLR, max_lr=each, total_steps=100)) for each in (1e-2, 1e-3)],
    "SequentialLR": [Made(schedule=partial(warm, each)) for each in (3, 5)],
    "ChainedScheduler": [Made(schedule=partial(chained, each)) for each in (0.9, 0.5)],
    "lr, LambdaLR": [Made(each, INVERSE) for each in (ADAM, SLOW)],
    "lr, StepLR": [Made(partial(in_tensor, r), s) for r, s in ((1e-2, STEPS_OF_2), (1e-3, STEPS_OF_4))],
}


@pytest.mark.promise("`--resume` with other settings, or from another folder")
@pytest.mark.parametrize("words", SCHEDULES)
def test_a_schedule_goes_where_one_that_is_made_now_would_be(words, goes_on):
    before, now = SCHEDULES[words]
    groups, _, heard = goes_on(before, now)
    (rate,), (wanted,) = ([group["lr"] for group in each] for each in (groups, goes_on.unbroken(now)[0]))
    assert rate == wanted and type(rate) is type(wanted)
    assert heard == said(words)


@pytest.mark.parametrize(
    ("before", "now", "why"),
    [
        (Made(), Made(partial(SGD, lr=1e-2)), "the checkpoint's optimizer is Adam, and this run's is SGD"),
        (
            Made(schedule=STEPS_OF_2),
            Made(schedule=partial(ExponentialLR, gamma=0.5)),
            "the checkpoint's schedule is StepLR, and this run's is ExponentialLR",
        ),
        (Made(schedule=STEPS_OF_2), Made(), "schedule is StepLR, and this run's is none"),
        (Made(), Made(partial(Adam, lr=1e-2, amsgrad=True)), "trained with amsgrad=False, and has amsgrad=True now"),
        (
            Made(partial(RMSprop, lr=1e-2)),
            Made(partial(RMSprop, lr=1e-2, momentum=0.5)),
            "its RMSprop was trained with momentum=0, and has momentum=0.5 now",
        ),
    ],
)
def test_what_the_state_would_not_fit_is_refused_by_name(before, now, why, goes_on):
    with pytest.raises(UserError, match=f"player 'generator': .*{why}; resume with the settings it was trained with"):
        goes_on(before, now)


# ---- beside weights: player_state.py ----


def player(updates, skipped):
    return SimpleNamespace(ema=None, average=SimpleNamespace(updates=updates), loss_scale=None, skipped=skipped)


def test_counts_of_updates_come_back():
    resumed = player(0, 0)
    load_rest(resumed, rest_of_state(player(5, 3)))
    assert (resumed.average.updates, resumed.skipped) == (5, 3)
