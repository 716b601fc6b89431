"""auto: what it takes a player to need, what it chooses, and that it trains as one device does."""

import re
import resource
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import Adafactor, Adam

from gan import Player
from strategies.policies import POLICIES
from strategies.policies.amounts import Held
from strategies.policies.belongings import Belongings
from strategies.policies.choice import Choice, choices
from strategies.training import assignment
from strategies.training.assignment import LEVELS, choose_levels, in_a_table, levels_of, memory
from strategies.world import World
from tests.support.hard_games import HARD
from tests.support.parity import EXACT, distance, train

GB = 10**9


def flat(net, optimizer=None, **kwargs):
    """A policy of a player, by its name, on some ranks."""
    player = Player("net", net, optimizer, **kwargs)
    parameters = dict(net.named_parameters())

    def policy(text, ranks=8):
        choice = choices(text, POLICIES)["*"]
        world = World(ranks, 0, torch.device("cpu"), ranks)
        return POLICIES[choice.policy](player, world, choice.options, Belongings(parameters, tuple(net.modules())))

    return policy


def needs(weights, state, ranks=8, frozen=False):
    """What a player of so many bytes needs under each level."""
    n = ranks
    if frozen:
        return {"ddp": Held(weights), "zero3": Held(weights / n), "zero3+offload": Held()}
    return {
        "ddp": Held(weights, weights, state),
        "zero1": Held(weights, weights, state / n),
        "zero2": Held(weights, weights / n, state / n),
        "zero3": Held(weights / n, weights / n, state / n),
        "zero3+offload": Held(),
    }


LARGE = needs(10 * GB, 30 * GB)
SMALL = needs(GB, 2 * GB)
TEACHER = needs(20 * GB, 0, frozen=True)
WHOLE = {"ddp": Held(10 * GB, 10 * GB, GB)}


def chosen(players, free, taken=0):
    return {each.player: each.level for each in choose_levels(players, taken, free)}


# ---- what a player needs ----


@pytest.mark.parametrize(
    ("optimizer", "ranks", "levels"),
    [
        (Adam, 8, LEVELS),
        (Adam, 1, ("ddp",)),  # nobody to share with
        (partial(Adafactor, lr=0.1), 8, ("ddp",)),  # it looks at whole weights
        (None, 8, ("ddp", "zero3", "zero3+offload")),
    ],
)
def test_the_levels_of_a_player(optimizer, ranks, levels):
    assert levels_of(flat(nn.Linear(10, 10), optimizer)("ddp", ranks)) == levels


def test_each_level_needs_less_than_the_one_before():
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(32)))
    policy, whole = flat(net, partial(Adam, lr=0.1), ema=0.9), 32 * 4096**2 * 4
    found = [policy(level).in_a_phase().bytes for level in LEVELS]
    assert found[0] == 5 * whole
    assert found[1] == 2 * whole + 3 * whole / 8
    assert found[3] == 5 * whole / 8
    assert found[4] == 0
    assert all(more > less for more, less in pairwise(found))
    assert policy("zero3+compile").in_a_phase().bytes == 5 * whole / 8 + whole  # which is gathered at once


def test_a_rank_has_its_part_of_what_is_free_and_no_more_than_a_limit_leaves(monkeypatch):
    cpu, limits = torch.device("cpu"), {}
    monkeypatch.setattr(assignment, "free_memory", lambda: 8 * GB)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: 2 * (limits.get(kind, resource.RLIM_INFINITY),))
    assert [memory(cpu, local) for local in (1, 4)] == [8 * GB, 2 * GB]
    for kind, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        (used,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
        limits |= {kind: int(used) * 1024 + GB}
        assert memory(cpu, 4) == pytest.approx(GB, rel=0.05)
        limits |= {kind: 1}
        assert memory(cpu, 4) == 0
        limits.clear()


# ---- what is chosen ----


BOTH = {"large": LARGE, "small": SMALL}


@pytest.mark.parametrize(
    ("players", "free", "levels"),
    [
        (BOTH, 200 * GB, ["ddp", "ddp"]),
        (BOTH, 108 * GB, ["ddp", "ddp"]),
        (BOTH, 107 * GB, ["zero1", "ddp"]),
        (BOTH, 50 * GB, ["zero2", "ddp"]),
        (BOTH, 30 * GB, ["zero3", "ddp"]),
        (BOTH, 19 * GB, ["zero3", "zero1"]),
        (BOTH, 15 * GB, ["zero3", "zero3"]),
        (BOTH, 5 * GB, ["zero3+offload", "zero3"]),
        (BOTH, GB // 2, ["zero3+offload", "zero3+offload"]),
        ({"teacher": TEACHER}, 20 * GB, ["zero3"]),  # shared out at once
        ({"whole": WHOLE, "small": SMALL}, 2 * GB, ["ddp", "zero3+offload"]),  # what cannot be cut is not
        ({"small": SMALL}, 40 * GB, ["ddp"]),
    ],
)
def test_the_least_communication_that_fits(players, free, levels):
    assert chosen(players, free) == dict(zip(players, levels, strict=True))


def test_what_the_user_has_chosen_counts():
    assert chosen({"small": SMALL}, 40 * GB, taken=17 * GB) == {"small": "zero1"}


def test_more_memory_never_shares_out_more():
    found = [chosen({**BOTH, "teacher": TEACHER}, free * GB).values() for free in range(1, 220)]
    shared = [sum(LEVELS.index(level) for level in levels) for levels in found]
    assert shared == sorted(shared, reverse=True)


def test_the_table_says_what_and_why():
    lines = in_a_table(choose_levels(BOTH, 0, 50 * GB), 50 * GB).splitlines()
    assert lines[0].startswith("auto: ddp would need 54 GB a rank; sharded as below it is 19 GB, of 25 GB (50 GB free")
    assert " ".join(lines[1].split()) == "player chosen weights gradients optimizer, average on a rank as ddp"
    assert " ".join(lines[2].split()) == "large zero2 10 GB 10 GB 30 GB 15 GB 50 GB"
    assert in_a_table(choose_levels({"small": SMALL}, 0, 50 * GB), 50 * GB).startswith("auto: ddp fits: 4 GB a rank")
    assert "it may not fit: 21 GB a rank; use more ranks" in in_a_table(choose_levels({"whole": WHOLE}, 0, GB), GB)


# ---- and it trains ----


def told_and_trained(policy, free):
    with mock.patch("strategies.training.assignment.memory", lambda *_: free), mock.patch("builtins.print") as said:
        found = train(HARD["Teacher"], policy=policy, world=2, steps=4)
    return found, [call.args[0] for call in said.call_args_list if "auto:" in str(call.args[0])]


@pytest.mark.parametrize(
    ("policy", "free", "levels"),
    [
        ("auto", 0, {"generator": "zero3+offload", "discriminator": "zero3+offload", "teacher": "ddp"}),
        ("generator=zero2,*=auto", 10**12, {"discriminator": "ddp", "teacher": "ddp"}),
    ],
)
def test_what_it_chooses_trains_as_one_device(policy, free, levels, ranks):
    alone = train(HARD["Teacher"], policy="single", steps=4)
    results = ranks(2).run(told_and_trained, policy, free)
    assert distance(results[0][0], alone) < EXACT
    ((table,), nothing) = (said for _, said in results)
    assert nothing == []
    assert {line.split()[0]: line.split()[1] for line in table.splitlines()[2:]} == levels


def test_options_that_all_policies_take_are_handed_on():
    (decision,) = choose_levels({"large": LARGE}, 0, GB)
    assert decision.choice(Choice("auto", {"more": 3})) == Choice("zero3", {"offload": None, "more": 3})
