"""What differs from one device only after the first step is named when later steps are tried too."""

import warnings
from unittest import mock

import pytest
import torch

from gan import Phase
from gan.errors import UserError
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


GAMES = [(Masked, masked), (Running, vectors), (Joins, vectors)]


@pytest.mark.parametrize(("game", "batches"), GAMES)
@pytest.mark.parametrize("policy", often(["zero3", "ddp", "zero1", "zero2", "fsdp"]))
def test_what_differs_later_is_named(policy, game, batches, ranks):
    said = ranks(2).run(refused, game, batches, policy, 2, steps=LATER, check="often")
    assert said[0] == said[1]
    assert "In a trial of step 10" in said[0] and "phase 'play': loss 'loss' is" in said[0]


@pytest.mark.parametrize(("game", "batches"), GAMES)
def test_it_is_named_under_dp(game, batches):
    assert "In a trial of step 10" in refused(game, batches, "dp", devices=2, steps=LATER, check="often")


@pytest.mark.parametrize(("game", "batches"), GAMES)
def test_the_control_that_tries_the_first_step_alone_does_not_see_it(game, batches, ranks):
    """And it is another training than that of one device."""
    found = ranks(2).run(train, game, batches, "ddp", 2, steps=LATER, check=True)
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


def steps_tried(phases, often, steps=50):
    trials, found = Trials(phases, often), []
    for step in range(steps):
        if trials.due(phases, step):
            found.append(step)
        trials.played |= {phase.name for phase in phases if phase.due(step, lambda _: True)}
    return found


def phase(name, **when):
    return Phase(name, lambda batch: None, name, **when)


def test_each_phase_is_tried_every_tenth_time():
    assert steps_tried([phase("a")], True) == [0, 10, 20, 30, 40]
    assert steps_tried([phase("a", every=4)], True) == [0, 40]
    assert steps_tried([phase("a"), phase("b", start=3, every=3)], True) == [0, 3, 13, 23, 33, 43]
    assert steps_tried([phase("a", when=lambda: True)], True) == [1, 11, 21, 31, 41]
    assert steps_tried([phase("a"), phase("b", start=3)], False) == [0, 3]


def test_another_word_is_refused():
    with pytest.raises(UserError, match=r"PhaseStrategy\(check='seldom'\): type True, False or 'often'"):
        PhaseStrategy("ddp", check="seldom")
