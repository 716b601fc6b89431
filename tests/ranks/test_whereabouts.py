"""Ranks that go different ways: the error names them, with the phase and the step of each, and nothing is saved."""

import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam
from torch.utils.data import DataLoader

from gan import GanModule, Phase, Player, ranks
from strategies import PhaseStrategy
from strategies.private import default_store
from strategies.processes import whereabouts
from strategies.processes.whereabouts import Whereabouts, _first_difference
from strategies.world import World
from tests.support.hard_games import Plain
from tests.support.parity import trainer, vectors
from tests.support.worlds import Ranks

LIMIT = timedelta(seconds=3)


@pytest.fixture
def pair():
    """Two ranks for one test, because a collective without an end leaves them useless."""
    world = Ranks(2, LIMIT)
    yield world
    for process in world.processes:
        process.kill()  # one that hangs does not hear a signal to end
    world.close()


class OwnTurns(Plain):
    """In step 2, rank 1 decides on another turn."""

    def training_step(self, batch):
        own = self.step == 2 and dist.get_rank() == 1
        self.trainer.strategy.run(self.phases[1 if own else 0], batch)


class Twins(GanModule):
    """Two players of the same size, so that their collectives fit each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 3)

    def configure_players(self):
        yield Player("one", self.one, partial(Adam, lr=1e-2))
        yield Player("two", self.two, partial(Adam, lr=1e-2))

    def configure_phases(self):
        yield Phase("first", lambda batch: self.one(batch["x"]).square().mean(), "one")
        yield Phase("second", lambda batch: self.two(batch["x"]).square().mean(), "two")

    training_step = OwnTurns.training_step


class Unlike(Twins):
    """The players' collectives do not fit each other."""

    def __init__(self):
        super().__init__()
        self.two = nn.Linear(6, 300)


class Alone(Plain):
    """In step 2, rank 1 asks the other ranks for something that they do not ask for."""

    def judge(self, batch):
        if self.step == 2 and dist.get_rank() == 1:
            ranks.mean(batch["x"])
        return super().judge(batch)


class OwnSums(Plain):
    """In step 2 rank 1 adds up alone."""

    def judge(self, batch):
        if self.step == 2 and dist.get_rank() == 1:
            dist.all_reduce(torch.zeros(1))
        return super().judge(batch)


class Hangs(Plain):
    """Before step 2, rank 1 does something that takes longer than the time limit."""

    def training_step(self, batch):
        if self.step == 2 and dist.get_rank() == 1:
            time.sleep(60)
        return super().training_step(batch)


class Stops(Plain):
    """After step 2 rank 1 ends the training, such as by its own loss."""

    def on_train_batch_end(self, *_):
        self.trainer.should_stop = self.trainer.global_step == 3 and dist.get_rank() == 1


def astray(game, batches, policy, listen=whereabouts.LISTEN):
    """The error of a rank that has so many batches."""
    strategy = PhaseStrategy(policy, check=False, timeout=LIMIT)
    loader = DataLoader([vectors(step) for step in range(batches[dist.get_rank()])], batch_size=None)
    with mock.patch.object(whereabouts, "LISTEN", listen):
        try:
            trainer(strategy, 2, 10, use_distributed_sampler=False).fit(game(), loader)
        except Exception as error:  # noqa: BLE001, whatever it is, the test reads it
            return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.promise("a turn decided by the rank's own loss")
@pytest.mark.promise("a collective never returns")
def test_ranks_that_wait_for_each_other_are_named(pair):
    one, other = pair.run(astray, OwnTurns, (5, 5), "zero3")
    assert "rank 0 plays phase 'discriminator' of step 2 where rank 1 plays phase 'generator' of step 2" in one
    assert "rank 1 plays phase 'generator' of step 2 where rank 0 plays phase 'discriminator' of step 2" in other


@pytest.mark.promise("loaders that end at different steps", "the training of one device, or a refusal by name")
@pytest.mark.parametrize(
    ("game", "batches", "policy"),
    [(Stops, (5, 5), "ddp"), *(pytest.param(Plain, (5, 3), each, marks=pytest.mark.slow) for each in ("zero3", "ddp"))],
)
def test_a_rank_that_ends_first_is_named(game, batches, policy, pair):
    """By itself, at once: the other waits for it in a collective."""
    _, said = pair.run(astray, game, batches, policy)
    assert "RanksDiverged: rank 1 has ended step 2 and begins no other where rank 0 " in said
    assert " of step 3, and would wait in vain; every rank needs the same number of batches" in said


def test_ranks_that_wait_in_one_phase_are_told_what_may_be_the_cause(pair):
    said = pair.run(astray, OwnSums, (5, 5), "ddp")
    assert any("plays phase 'discriminator' of step 2 where all others do too" in str(each) for each in said)
    assert any("where samples choose them, type +whole" in str(each) for each in said)


def between_phases():
    try:
        with Whereabouts(World(2, dist.get_rank()), default_store()).named():
            raise RuntimeError("Timed out waiting 3000ms for recv operation to complete")
    except whereabouts.RanksDiverged as error:
        return str(error)


def test_so_are_ranks_that_wait_between_phases(pair):
    assert (
        "where all others do too (one may be slow), so they wait for each other in vain" in pair.run(between_phases)[1]
    )


def test_a_rank_that_waits_for_none_is_named_by_those_that_wait_for_it(pair):
    for pipe in pair.pipes:
        pipe.send((astray, (Hangs, (5, 5), "ddp", 0.5), {}))
    _, said = pair.pipes[0].recv()  # nobody waits for the rank that hangs
    assert "rank 0 plays phase 'discriminator' of step 2 where rank 1 begins step 2" in said


def survivors(world, *args):
    """What the ranks return that gloo has not ended."""
    for pipe in world.pipes:
        pipe.send((astray, args, {}))
    found = {}
    for rank, pipe in enumerate(world.pipes):
        with suppress(EOFError):
            found[rank] = pipe.recv()[1]
    return found


def test_a_rank_that_gloo_ends_is_named_with_its_phase(pair):
    """Under ddp gloo ends a rank that gets more than it expects. That rank cannot say anything."""
    (said,) = survivors(pair, Unlike, (5, 5), "ddp").values()
    assert "RankLost: rank 0 (process" in said
    assert "; rank 0 plays phase 'first' of step 2 where rank 1 plays phase 'second' of step 2, and their coll" in said


@pytest.mark.slow
def test_a_call_of_gan_ranks_that_one_rank_makes_is_named(pair):
    one, other = pair.run(astray, Alone, (5, 5), "zero3")
    where = "in gan.ranks.mean (test_whereabouts.py, line"
    assert (
        f"rank 0 plays phase 'discriminator' of step 2 where rank 1 plays phase 'discriminator' of step 2, {where}"
        in one
    )
    assert where in other and "where rank 0 plays phase 'discriminator' of step 2, so they wait" in other
    assert "call none in a branch that depends on the rank's own samples" in one


@pytest.mark.promise("a turn decided by the rank's own loss")
def test_ranks_that_did_not_wait_are_named_before_anything_is_saved(ranks):
    said = ranks(2).run(astray, Twins, (5, 5), "ddp")
    assert said[0] == said[1]
    assert "rank 0 has played phase 'first' of step 2, rank 1 has played phase 'second' of step 2" in said[0]


def test_the_first_difference_is_found_in_what_is_still_known():
    plays = [(step, "d") for step in range(5)]
    other = [*plays[:3], (3, "g"), (4, "d")]
    assert "rank 0 has played phase 'd' of step 3, rank 1 has played phase 'g' of step 3" in _first_difference(
        [(0, plays), (2, other[2:])]
    )
    assert "rank 0 has played phase 'd' of step 4, rank 1 has ended" in _first_difference([(0, plays), (0, plays[:4])])
    assert "some 1 phases ago" in _first_difference([(4, plays[4:]), (4, other[4:])])
