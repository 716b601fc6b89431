"""When a phase is played: start, until, every and when, on all ranks alike and as in a loop by hand."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gan import Phase
from strategies.ranks import World
from tests.support.duel import POLICIES, ByHand, Duel, fit, of, played
from tests.support.parity import BROKEN, EXACT, distance, often
from tests.support.word_games import on_odd_rank


class Turns(Duel):
    def configure_phases(self):
        yield Phase("judge", self.judging, "judge", until=7, when=lambda: self.step % 3 == on_odd_rank())
        yield Phase("fool", self.fooling, "generator", start=2, every=3)
        yield Phase("again", self.judging, "judge", start=4, until=6)


class TurnsByHand(ByHand):
    remainder = 0

    def due(self, turn, step):
        if turn == "judge":
            return step < 7 and step % 3 == self.remainder
        return step in ((2, 5, 8) if turn == "fool" else (4, 5))


class OfTheSecond(TurnsByHand):
    """What is trained where the second rank is asked."""

    remainder = 1


@pytest.fixture(scope="module")
def by_hand():
    return TurnsByHand().run()


@pytest.mark.parametrize(("policy", "world"), often(POLICIES.items()))
def test_a_phase_is_played_in_its_steps_alone(policy, world, ranks, by_hand):
    assert distance(of(played(ranks, Turns, policy, world), by_hand), by_hand) < EXACT


def asking_the_last(self, question):
    answer = torch.tensor(question())
    dist.broadcast(answer, self.size - 1)
    return bool(answer)


def wrongly(policy, world):
    with mock.patch.object(World, "answer", asking_the_last):
        return fit(Turns, policy, world)


def test_the_control_asked_on_another_rank_it_is_another_training(ranks, by_hand):
    found = ranks(2).run(wrongly, "zero2", 2)[0]
    assert distance(of(found, by_hand), by_hand) > BROKEN
    other = OfTheSecond().run()
    assert distance(of(found, other), other) < EXACT


def asked(policy, world):
    """How often a phase's `when` was called on this rank, and how many phases were played."""
    calls, played_ = [], []

    class Asking(Duel):
        def configure_phases(self):
            yield Phase("judge", self.judging, "judge", start=1, every=2, when=lambda: bool(calls.append(1)) or True)
            yield Phase("fool", self.fooling, "generator")

        def judging(self, batch):
            played_.append(1)
            return super().judging(batch)

    fit(Asking, policy, world, 6, check=False)
    return len(calls), len(played_)


def test_only_the_first_rank_is_asked_and_only_when_the_phase_is_due_otherwise(ranks):
    assert asked("single", 1) == (3, 3)
    assert ranks(2).run(asked, "ddp", 2) == [(3, 3), (0, 3)]
