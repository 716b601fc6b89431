"""What differs from one device only after the first step is named, because later steps are tried too."""

import warnings
from unittest import mock

import pytest
import torch

from gan import Phase
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.check import trial
from strategies.check.trial import Trials
from tests.ranks.test_check import One, Stateful
from tests.support.hard_games import HARD
from tests.support.parity import distance, often, refused, train, vectors

LATER = 11  # steps: from step 0 to 10


class Masked(One):
    """A mean over what a mask leaves. In the first batch it leaves everything."""

    def play(self, batch):
        return (self.net(batch["x"]).square().mean(1) * batch["mask"]).sum() / batch["mask"].sum()


def masked(step):
    batch = vectors(step)
    mask = torch.ones(len(batch["x"]), dtype=torch.float64)
    if step:
        mask[[2, 8, 12]] = 0.0
    return {**batch, "mask": mask}


class Running(One):
    """A running mean, kept as a number of Python's, of the rank's own samples."""

    mean = 0.0

    def play(self, batch):
        score = self.net(batch["x"]).square().mean()
        loss = score * (1 + self.mean)
        self.mean = 0.9 * self.mean + 0.1 * score.item()
        return loss


class Joins(One):
    """A term that looks at the whole batch joins the loss at step 3."""

    def play(self, batch):
        out = self.net(batch["x"])
        return out.square().mean() + (out.std() if self.step >= 3 else 0)


class Named(Joins):
    """The same, and the term that joins has a name."""

    def play(self, batch):
        out = self.net(batch["x"])
        losses = {"score": out.square().mean()}
        return losses | ({"spread": out.std()} if self.step >= 4 else {})


# A game, its batches, and the step whose trial names it.
GAMES = [(Masked, masked, 1), (Running, vectors, 1), (Joins, vectors, 3), (Named, vectors, 5)]


@pytest.mark.parametrize(("game", "batches", "step"), GAMES)
@pytest.mark.parametrize("policy", often(["zero3", "ddp", "zero1", "zero2", "fsdp"]))
def test_what_differs_later_is_named(policy, game, batches, step, ranks):
    said = ranks(2).run(refused, game, batches, policy, 2, steps=LATER, check=True)
    assert said[0] == said[1]
    assert f"In a trial of step {step}" in said[0] and "phase 'play': loss '" in said[0]


def test_what_ranks_remember_differently_is_said(ranks):
    said = ranks(2).run(refused, Running, world=2, steps=LATER, check=True)[0]
    assert "on another, for the same samples" in said and "What a loss remembers" in said


@pytest.mark.parametrize(("game", "batches", "step"), GAMES)
def test_the_control_without_the_check_differs_in_silence(game, batches, step, ranks):
    found = ranks(2).run(train, game, batches, "ddp", 2, steps=LATER, check=False)
    assert distance(found[0], train(game, batches, steps=LATER)) > 1e-6


def trained(game, policy, check, times=10):
    with warnings.catch_warnings(), mock.patch.object(trial, "TIMES", times):
        warnings.simplefilter("ignore")
        return train(game, policy=policy, world=2, steps=4 if times < 10 else LATER + 1, check=check)


@pytest.mark.parametrize("policy", often(["ddp", "zero3", "zero1", "zero2", "zero3+whole"]))
@pytest.mark.parametrize(
    "game", often([Stateful, HARD["BatchNorms"], HARD["Every"], HARD["Micro4"], HARD["Teacher"]], [Stateful])
)
def test_training_stays_the_same_to_the_bit(policy, game, ranks):
    """In a trial before each step."""
    together = ranks(2).run(trained, game, policy, "often", 1)
    assert distance(together[0], ranks(2).run(trained, game, policy, False, 1)[0]) == 0


def steps_tried(phases, often=False, steps=400):
    trials, found = Trials(phases, often), []
    for step in range(steps):
        if trials.due(phases, step):
            found.append(step)
        for phase in phases:
            if phase.due(step, lambda _: True):
                trials.saw(phase.name, ["loss"] if phase.name != "changes" or step < 20 else ["loss", "other"])
    return found


def phase(name, **when):
    return Phase(name, lambda batch: None, name, **when)


def test_a_phase_is_tried_at_growing_distances():
    assert steps_tried([phase("a")]) == [0, 1, 3, 10, 30, 100, 300]
    assert steps_tried([phase("a", every=4)]) == [0, 4, 12, 40, 120]
    assert steps_tried([phase("a", start=50), phase("b", start=350)]) == [
        50,
        51,
        53,
        60,
        80,
        150,
        350,
        351,
        353,
        360,
        380,
    ]
    assert steps_tried([phase("a", when=lambda: True)]) == [1, 2, 4, 11, 31, 101, 301]


def test_a_phase_is_tried_again_when_its_losses_get_other_names():
    assert steps_tried([phase("changes")]) == [0, 1, 3, 10, 21, 30, 100, 300]


def test_often_each_phase_is_tried_at_least_every_tenth_time():
    assert steps_tried([phase("a")], True, 50) == [0, 1, 3, 10, 20, 30, 40]
    assert steps_tried([phase("a", every=4)], True, 50) == [0, 4, 12, 40]


def test_another_word_is_refused():
    with pytest.raises(UserError, match=r"PhaseStrategy\(check='seldom'\): type True, False or 'often'"):
        PhaseStrategy("ddp", check="seldom")
