"""Losses with forward-mode derivatives and torch.func train as on one device, or the error says what to type."""

from dataclasses import replace
from functools import cache
from unittest import mock

import pytest
from torch import nn
from torch.func import grad

from gan import Phase
from gan.files.errors import UserError
from strategies.policies import POLICIES
from tests.support.duel import fit, played
from tests.support.forward_games import GAMES, Derived, Slopes, joined
from tests.support.parity import BROKEN, EXACT, Deaf, distance, often

WORLDS = {"ddp": 2, "zero1": 4, "zero2": 2, "zero3": 2, "fsdp": 2}


@pytest.fixture(scope="module")
def alone():
    return cache(lambda name: fit(GAMES[name], "single", 1))


@pytest.mark.parametrize("policy", often(WORLDS, ["zero3"]))
@pytest.mark.parametrize("name", GAMES)
def test_it_trains_as_one_device(name, policy, ranks, alone):
    assert distance(played(ranks, GAMES[name], policy, WORLDS[policy]), alone(name)) < EXACT


@pytest.mark.parametrize("name", ["MeanFlow", "Slopes"])
def test_it_does_with_a_player_that_is_whole_for_the_phase(name, ranks, alone):
    assert distance(played(ranks, GAMES[name], "zero3", 2, small=False), alone(name)) < EXACT


@pytest.mark.parametrize("policy", often(["ddp+recompute", "zero3+recompute"], ["zero3+recompute"]))
@pytest.mark.parametrize("name", ["MeanFlow", "Duals", "Slopes"])
def test_it_does_with_recompute_which_keeps_all_there(name, policy, ranks, alone):
    assert distance(played(ranks, GAMES[name], policy, 2), alone(name)) < EXACT


def as_control(control, name):
    with mock.patch.dict(POLICIES, ddp=control):
        return fit(GAMES[name], "ddp", 2, check=False)


class Still(Derived):
    """MeanFlow without its derivative."""

    def loss(self, batch):
        z, r, t, v = self.place(batch)
        return (joined(self.net, z, r, t) - v).square().mean()


def test_the_controls_differ(ranks, alone):
    for name in ("MeanFlow", "Slopes"):
        assert distance(ranks(2).run(as_control, Deaf, name)[0], alone(name)) > BROKEN
    assert distance(fit(Still, "single", 1), alone("MeanFlow")) > BROKEN


# ---- a graph of a phase of second order, in a later phase ----


class Handed(Derived):
    """What `shared` makes in a phase without places, and a later phase runs backward."""

    def configure_players(self):
        net, teacher = super().configure_players()
        yield net
        yield replace(net, name="teacher", module=teacher.module, ema=None)

    def configure_phases(self):
        yield Phase("teacher", self.loss, "teacher", second_order=True)
        yield Phase("net", lambda batch: self.shared("made", self.made, batch).square().mean(), "net")

    def made(self, batch):
        z, r, t, _ = self.place(batch)
        return joined(self.net, z, r, t)

    def loss(self, batch):
        z, r, t, _ = self.place(batch)
        made = self.shared("made", self.made, batch).detach()
        slope = grad(lambda z: joined(self.teacher, z, r, t).square().sum())(z)
        return (slope - made).square().mean()


def test_what_shared_makes_in_such_a_phase_is_for_later_phases_too(ranks):
    assert distance(played(ranks, Handed, "zero3", 2), fit(Handed, "single", 1)) < EXACT


class ByHand(Derived):
    """The same by an attribute of one's own. No weight of this graph is updated before its backward needs it."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 8)

    def configure_phases(self):
        yield Phase("first", self.first, "net", second_order=True)
        yield Phase("second", lambda batch: self.made.square().mean(), "net")

    def first(self, batch):
        self.made = self.teacher(self.net(batch["x"]))
        return self.net(batch["x"]).square().mean()


def failure(game, policy):
    try:
        fit(game, policy, 2, check=False)
    except (UserError, RuntimeError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("policy", ["zero3", "fsdp"])
def test_another_graph_of_it_is_an_error_and_never_wrong(policy, ranks):
    assert ranks(2).run(failure, ByHand, "zero2") == [None, None]
    for message in ranks(2).run(failure, ByHand, policy):
        assert "has been modified by an inplace operation" in message


def unended():
    with mock.patch("strategies.sharding.unshard_on_read.end_graphs"):
        return failure(ByHand, "zero3")


def test_the_control_that_lets_graphs_live_does_not_notice(ranks):
    assert ranks(2).run(unended) == [None, None]


def unended_under_fsdp():
    with mock.patch("strategies.sharding.unshard_on_read.end_graphs"):
        return failure(ByHand, "fsdp")


def test_the_control_under_fsdp_fails_in_other_words(ranks):
    """FSDP2 has freed the memory that the graph needs."""
    for message in ranks(2).run(unended_under_fsdp):
        assert "inplace" not in message and "storage" in message


# ---- refusals ----


class FirstOrder(Slopes):
    second_order = False


def test_a_gradient_by_torch_func_needs_weights_that_stay(ranks):
    for message in ranks(2).run(failure, FirstOrder, "zero3"):
        assert message.startswith("phase 'net' differentiates by torch.func")
        assert "type Phase('net', ..., second_order=True)" in message
