"""What players that share parameters show and count; that they train as by hand: tests/scenes/losses.py."""

import pytest
import torch
from torch import nn

from strategies.policies.belongings import belongings_of
from strategies.policies.ddp import Ddp
from strategies.world import World
from tests.ranks.test_compile import without_cpp
from tests.support.duel import fit
from tests.support.parity import EXACT, distance, in_buckets, often, vectors
from tests.support.scene import SMALL
from tests.support.sharing_games import Adapters, SharedBase
from tests.support.watch import looked


@torch.no_grad()
def made_between(strategy, module):
    """What code between phases makes with averaged weights, and with whole ones."""
    x = vectors(0)["x"]
    with strategy.averaged():
        average = module.student(x)
    with strategy.gathered():
        return {"average": average, "student": module.student(x), "fake": module.fake(x), "teacher": module.teacher(x)}


@pytest.mark.parametrize("game", often([Adapters, SharedBase], [Adapters]))
def test_between_phases_base_and_adapters_are_whole_or_averaged(game, ranks):
    expected = looked(made_between, game, "single", 1, 2)
    for policy in ("zero1", "zero3", "student=ddp,*=zero3"):
        found = ranks(2).run(in_buckets, SMALL, looked, made_between, game, policy, 2, 2)[0]
        assert distance(found, expected) < EXACT
    assert len({value.sum().item() for value in expected.values()}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["zero3+compile", "fake=ddp+compile,*=zero3"])
def test_a_compiled_network_finds_the_weights_that_others_store(policy, ranks):
    found = ranks(2).run(without_cpp, fit, SharedBase, policy, 2, 4)[0]
    assert distance(found, fit(SharedBase, "single", 1, 4)) < EXACT


def test_auto_counts_the_base_once():
    players = {player.name: player for player in SharedBase().configure_players()}
    own = belongings_of(players, nn.Identity())
    world = World(2, 0, torch.device("cpu"), 2)
    total = sum(Ddp(player, world, {}, own[name]).in_a_phase().weights for name, player in players.items())
    assert total == 4 * sum(weight.numel() for weight in SharedBase().parameters())
    assert fit(SharedBase, "auto", 1, steps=1)
