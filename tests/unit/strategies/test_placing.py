"""Players on ranks of their own."""

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gan.files.errors import UserError
from gan.noise import Place
from strategies.batches.draw_kernels import draws_follow
from strategies.placing.division import Division, placement_of
from strategies.placing.messages import LEAVE, Call, Enter, Packed, Unpacker
from strategies.placing.remote_player import Servers
from strategies.placing.server import Answers, Fingerprint, rounds
from strategies.policies import POLICIES
from strategies.policies.choice import choices

# ---- messages ----


CPU = torch.device("cpu")


def test_the_rank_s_device_becomes_the_other_s_and_what_cannot_be_sent_is_named():
    packed = Packed([torch.device("cuda", 1), torch.device("cpu")], torch.device("cuda", 1))
    assert Unpacker(packed.content, [], torch.device("cuda", 3)).load() == [torch.device("cuda", 3), CPU]
    with pytest.raises(UserError, match="what it is called with cannot be sent"):
        Packed(lambda x: x, CPU, "what it is called with")


# ---- placement ----


def placed(typed: str, ranks: int):
    return placement_of(choices(typed, POLICIES), ranks)


@pytest.mark.parametrize("rest", ["*=ddp", "*=ddp@0-1", "* = ddp @ 0 - 1"])
def test_several_sets_serve_the_rest_trains_and_without_any_nothing_is_placed(rest):
    found = placed(f"a=zero3@2-3,b=ddp@2-3,c=ddp@4,{rest}", 5)
    assert found.training == range(2) and found.serving == {"a": range(2, 4), "b": range(2, 4), "c": range(4, 5)}
    assert found.part(4) == range(4, 5) and len(found.part(2)) == 2
    division = Division()
    division.placement = found
    division.take_part(3, print, print)
    assert (division.trains, division.number, len(division.part)) == (False, 1, 2)
    assert placed("teacher=zero3,*=ddp", 4) is None


@pytest.mark.parametrize(
    ("typed", "ranks"),
    [
        ("teacher=zero3@2-3,*=ddp", 2),  # ranks that are not there
        (f"teacher=zero3@2-{10**25},*=ddp", 4),
        ("teacher=zero3@2-3,*=ddp@0-1", 6),  # ranks without a player
        ("teacher=zero3@2-3,eye=ddp@0-1,*=ddp", 4),  # players without a rank
        ("teacher=zero3@0-1,*=ddp", 4),  # the first ranks would serve
        ("teacher=zero3@1-2,eye=ddp@2-3,*=ddp@0", 4),  # a rank in two parts
        ("teacher=zero3@1,*=ddp", 4),  # ranks that are no neighbours
        ("zero3@0-1", 2),  # nobody serves
    ],
)
def test_what_cannot_be_is_refused(typed, ranks):
    devices = "--devices 4, or " if ranks == 6 else ""
    with pytest.raises(UserError, match=f"does not place {ranks} ranks: .* type {devices}e.g. teacher=zero3@2-3"):
        placed(typed, ranks)


@pytest.mark.parametrize("no_range", ["", "a", "3-2", "1-", "-1", "1-b", "1.5"])
def test_what_is_no_range_is_refused(no_range):
    with pytest.raises(UserError, match=r"type e.g. zero3@2-3"):
        placed(f"teacher=zero3@{no_range},*=ddp", 4)


@given(training=st.integers(1, 12), serving=st.integers(1, 6))
def test_every_call_is_answered_once_and_all_work_in_every_round(training, serving):
    those = [rounds(range(training), range(10, 10 + serving), number) for number in range(serving)]
    answered = [rank for each in those for rank, own in each if own]
    assert sorted(answered) == list(range(training))
    assert len({len(each) for each in those}) == 1, "a rank without a call in a round would be missed"
    for each in those:
        assert len({rank for rank, _ in each}) == len(each), "a call would come twice to one rank"


def test_an_inner_context_that_ends_leaves_the_outer_one():
    bridge = mock.Mock(rank=0, device=CPU)
    servers = Servers(bridge, range(2), range(2, 4), print)
    servers.together = True
    with servers.inside(Enter()):
        with servers.inside(Enter()):  # as averaged() inside gathered()
            servers.enter()
        servers.enter()
    assert [call.args[1] for call in bridge.send.call_args_list] == [Enter(), LEAVE]


# ---- server ----


@dataclass
class Dial:
    turn: float


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.strength, self.seen, self.cache, self.dial = 1.0, [], None, Dial(1.0)
        self.register_buffer("shift", torch.zeros(2))


CHANGES: list[tuple[str, Callable[[Network], Any]]] = [
    ("strength", lambda network: setattr(network, "strength", 2.0)),
    ("cache", lambda network: setattr(network, "cache", torch.ones(1))),
    ("seen", lambda network: network.seen.append(3)),
    ("dial", lambda network: setattr(network.dial, "turn", 2.0)),
    ("shift", lambda network: network.shift.add_(1)),
    ("inner.1.momentum", lambda network: setattr(network.inner[1], "momentum", 0.2)),
    ("inner.1", lambda network: network.inner.__setitem__(1, nn.Identity())),
    ("more", lambda network: setattr(network, "more", nn.Identity())),
    ("strength", lambda network: delattr(network, "strength")),
    ("forward", lambda network: setattr(network, "forward", print)),
]


@pytest.mark.parametrize(("name", "change"), CHANGES, ids=[name for name, _ in CHANGES])
def test_what_is_set_is_named(name, change):
    network = Network()
    before = Fingerprint(network)
    change(network)
    found = before.changed()
    assert found is not None and (found == name or found.startswith(f"{name}."))


def test_a_weight_that_torchs_norm_sets_in_each_call_is_no_change():
    network = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))
    network.eval()
    before = Fingerprint(network)
    network(torch.ones(1, 4))
    assert before.changed() is None
    network.train()
    network(torch.ones(1, 4))
    assert before.changed() == "0.weight_u"


def forked():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return torch.rand(4)


@pytest.mark.parametrize(
    ("draws", "seeded", "refused"),
    [
        (lambda: np.random.rand(), False, True),
        (lambda: random.random(), False, True),
        (lambda: torch.manual_seed(1) and None, False, True),
        (lambda: torch.rand(4), True, True),
        (lambda: torch.rand(4), False, False),
        (forked, False, False),
        (lambda: None, True, False),
    ],
)
def test_draws_from_generators_of_the_training_rank_are_refused(draws, seeded, refused):
    nothing, place = Packed(((), {}), CPU).content, Place(("a",), 0, 4, 4, seeded=seeded)
    call = Call("net", "draw", nothing, [], 1, False, False, None, torch.float32, place, 1, frozenset(), [])
    network = nn.Module()
    network.draw = draws
    answers = Answers({"net": mock.Mock(player=mock.Mock(module=network))}, CPU, "1")
    said = "'draw' of player 'net', which is on another rank, draws by NumPy, .*; draw in the loss, and"
    with draws_follow(CPU), pytest.raises(UserError, match=said) if refused else nullcontext():
        answers.called(0, call)
