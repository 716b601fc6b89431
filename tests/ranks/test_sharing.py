"""What players that share parameters hold and show; that they train as by hand: tests/scenes/losses.py."""

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn

from strategies import PhaseStrategy
from strategies.policies.belongings import belongings_of
from strategies.policies.ddp import Ddp
from strategies.world import World
from tests.ranks.test_compile import without_cpp
from tests.support.duel import fit
from tests.support.parity import EXACT, distance, in_buckets, often, parts, trainer, vectors
from tests.support.saved import read_checkpoint
from tests.support.scene import SMALL
from tests.support.sharing_games import Adapters, OneModule, SharedBase


def held(game, policy, world):
    """How many elements the ranks hold of each player in shards, and what that player has itself."""
    module, strategy = game(), PhaseStrategy(policy, check=False)
    found = {}

    def look(*_):
        for name, each in strategy.policies.items():
            sharded = sum(weight.numel() for bucket in each.storage.buckets for weight in bucket.weights.values())
            found[name] = sharded, sum(weight.numel() for weight in each.belongings.parameters.values())

    made = trainer(strategy, world, 1, callbacks=[LambdaCallback(on_train_end=look)])
    in_buckets(SMALL, made.fit, module, parts(1, world))
    return found


@pytest.mark.parametrize("game", [Adapters, SharedBase])
def test_the_base_is_sharded_once(game, ranks):
    found = ranks(2).run(held, game, "zero3", 2)[0]
    assert all(sharded == own for sharded, own in found.values())
    assert sum(own for _, own in found.values()) == sum(weight.numel() for weight in game().parameters())


def looked(game, policy, world):
    """What code between phases finds: averaged weights, and whole ones."""
    module, strategy = game(), PhaseStrategy(policy, check=False)
    found = {}

    @torch.no_grad()
    def look(*_):
        x = vectors(0)["x"]
        with strategy.averaged():
            found["average"] = module.student(x)
        with strategy.gathered():
            found.update(student=module.student(x), fake=module.fake(x), teacher=module.teacher(x))

    made = trainer(strategy, world, 2, callbacks=[LambdaCallback(on_train_batch_end=look)])
    in_buckets(SMALL, made.fit, module, parts(2, world))
    return found


@pytest.mark.parametrize("game", often([Adapters, SharedBase], [Adapters]))
def test_between_phases_base_and_adapters_are_whole_or_averaged(game, ranks):
    expected = looked(game, "single", 1)
    for policy in ("zero1", "zero3", "student=ddp,*=zero3"):
        assert distance(ranks(2).run(looked, game, policy, 2)[0], expected) < EXACT
    assert len({value.sum().item() for value in expected.values()}) == 4


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["zero3+compile", "fake=ddp+compile,*=zero3"])
def test_a_compiled_network_finds_the_weights_that_others_store(policy, ranks):
    found = ranks(2).run(without_cpp, fit, SharedBase, policy, 2, 4)[0]
    assert distance(found, fit(SharedBase, "single", 1, 4)) < EXACT


def test_a_frozen_player_is_in_evaluation_mode_but_for_what_a_learner_has():
    for game, names in ((OneModule, set()), (SharedBase, {"teacher"})):
        made = game()
        trainer(PhaseStrategy("single"), 1, 1).fit(made, parts(1))
        assert {name for name, module in made.named_children() if not module.training} == names


def test_auto_counts_the_base_once():
    players = {player.name: player for player in SharedBase().configure_players()}
    own = belongings_of(players, nn.Identity())
    world = World(2, 0, torch.device("cpu"), 2)
    total = sum(Ddp(player, world, {}, own[name]).in_a_phase().weights for name, player in players.items())
    assert total == 4 * sum(weight.numel() for weight in SharedBase().parameters())
    assert fit(SharedBase, "auto", 1, steps=1)


def test_the_base_is_saved_once(tmp_path):
    fit(SharedBase, "single", 1, steps=1, save=str(tmp_path / "one.ckpt"))
    saved = [value for value in read_checkpoint(tmp_path / "one.ckpt")["state_dict"].values() if torch.is_tensor(value)]
    assert sum(value.numel() for value in saved) == sum(weight.numel() for weight in SharedBase().parameters())
