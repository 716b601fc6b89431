"""Frozen parameters that several players have, and players that are some parameters of a network."""

from typing import Any
from unittest import mock

import pytest
import torch
from lightning import Callback
from torch import nn

from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.options import compile
from strategies.policies.belongings import Belongings, belongings_of
from strategies.policies.ddp import Ddp
from strategies.ranks import World
from tests.support.duel import SMALL, fit, of, played
from tests.support.parity import BROKEN, EXACT, Deaf, distance, in_buckets, often, parts, train, trainer, vectors
from tests.support.saved import read_checkpoint
from tests.support.sharing_games import Adapters, FollowingAdapters, OneModule, SharedBase, by_hand

POLICIES = {
    "ddp": 2,
    "zero1": 2,
    "zero2": 4,
    "zero3": 2,
    "deepspeed1": 2,
    "deepspeed3": 2,
    "student=zero3,*=ddp": 2,
    "student=ddp,*=zero3": 2,
    "teacher=zero3+offload,*=zero1": 4,
}
FEW = ("zero3", "student=ddp,*=zero3")  # for the game that the matrix does not have; it has all others


@pytest.fixture(scope="module")
def alone() -> dict[Any, dict[str, Any]]:
    """Each game under `single`."""
    return {game: fit(game, "single", 1) for game in (Adapters, SharedBase, OneModule, FollowingAdapters)}


@pytest.mark.parametrize("game", [Adapters, SharedBase])
def test_one_device_trains_as_a_loop_by_hand(game, alone):
    expected = by_hand(game())
    assert distance(of(alone[game], expected), expected) < EXACT
    learned = {
        key
        for key, value in game().double().state_dict().items()
        if not torch.equal(value, alone[game][f"weight {key}"])
    }
    assert learned == {key for key in game().state_dict() if "down" in key or "up" in key}


@pytest.mark.parametrize(
    ("game", "policy", "world"),
    [
        *(pytest.param(Adapters, *each.values, marks=each.marks) for each in often(POLICIES.items())),
        *((FollowingAdapters, policy, POLICIES[policy]) for policy in FEW),
    ],
)
def test_players_that_share_a_base_train_as_on_one_device(game, policy, world, ranks, alone):
    assert distance(played(ranks, game, policy, world), alone[game]) < EXACT


@pytest.mark.parametrize("game", [Adapters, SharedBase])
def test_the_control_without_synchronisation(game, ranks, alone):
    assert distance(ranks(2).run(train, game, policy=Deaf, world=2)[0], alone[game]) > BROKEN


def alone_of(players, game):
    return {
        name: Belongings(dict(player.module.named_parameters()), tuple(player.module.modules()))
        for name, player in players.items()
    }


def as_if_alone(game, policy, world):
    """Train as if each player shared nothing. Returns the error, if there is one."""
    with mock.patch("strategies.assignment.belongings_of", alone_of):
        try:
            return fit(game, policy, world)
        except UserError as error:
            return str(error)


def test_the_control_where_only_a_players_own_modules_are_listened_to(ranks):
    found = ranks(2).run(as_if_alone, Adapters, "zero3", 2)
    assert all(isinstance(each, str) and "depends on no weight of fake" in each for each in found)


def test_the_control_where_after_does_nothing(alone):
    careless = type("Careless", (SharedBase,), {"after": None})
    assert distance(by_hand(careless()), of(alone[SharedBase], by_hand(careless()))) > BROKEN


def held(game, policy, world):
    """How many elements the ranks hold of each player in shards, and what that player has itself."""
    module, strategy = game(), PhaseStrategy(policy)
    found = {}

    class Look(Callback):
        def on_train_end(self, *_):
            for name, each in strategy.policies.items():
                sharded = sum(weight.numel() for bucket in each.storage.buckets for weight in bucket.weights.values())
                found[name] = sharded, sum(weight.numel() for weight in each.belongings.parameters.values())

    in_buckets(SMALL, trainer(strategy, world, 1, callbacks=[Look()]).fit, module, parts(1, world))
    return found


@pytest.mark.parametrize("game", [Adapters, SharedBase])
def test_the_base_is_sharded_once(game, ranks):
    found = ranks(2).run(held, game, "zero3", 2)[0]
    assert all(sharded == own for sharded, own in found.values())
    assert sum(own for _, own in found.values()) == sum(weight.numel() for weight in game().parameters())


def looked(game, policy, world):
    """What code between phases finds: averaged weights, and whole ones."""
    module, strategy = game(), PhaseStrategy(policy)
    found = {}

    class Look(Callback):
        @torch.no_grad()
        def on_train_batch_end(self, *_):
            x = vectors(0)["x"]
            with strategy.averaged():
                found["average"] = module.student(x)
            with strategy.gathered():
                found.update(student=module.student(x), fake=module.fake(x), teacher=module.teacher(x))

    made = trainer(strategy, world, 2, callbacks=[Look()])
    in_buckets(SMALL, made.fit, module, parts(2, world))
    return found


@pytest.mark.parametrize("game", often([Adapters, SharedBase], [Adapters]))
def test_between_phases_base_and_adapters_are_whole_or_averaged(game, ranks):
    expected = looked(game, "single", 1)
    for policy in ("zero1", "zero3", "student=ddp,*=zero3"):
        assert distance(ranks(2).run(looked, game, policy, 2)[0], expected) < EXACT
    assert len({value.sum().item() for value in expected.values()}) == 4


def compiled(policy, world):
    torch._dynamo.reset()
    with mock.patch.object(compile, "BACKEND", "aot_eager"):
        return fit(SharedBase, policy, world, 4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["zero3+compile", "fake=ddp+compile,*=zero3"])
def test_a_compiled_network_finds_the_weights_that_others_store(policy, ranks):
    assert distance(ranks(2).run(compiled, policy, 2)[0], fit(SharedBase, "single", 1, 4)) < EXACT


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


def test_recompute_is_refused_where_another_player_may_change_the_network():
    with pytest.raises(UserError, match="'teacher': option recompute would run its blocks again, and player 'student'"):
        fit(OneModule, "teacher=single+recompute,*=single", 1)


# ---- saved and resumed ----

HALF = 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("game", "policy", "world"),
    [
        (Adapters, "zero3", 2),
        pytest.param(SharedBase, "zero3", 2, marks=pytest.mark.slow),
        (SharedBase, "ddp", 2),
    ],
)
def test_it_is_resumed_bit_for_bit(game, policy, world, ranks, tmp_path):
    unbroken = played(ranks, game, policy, world)
    played(ranks, game, policy, world, steps=HALF, save=str(tmp_path / "half.ckpt"))
    assert distance(played(ranks, game, policy, world, resume=str(tmp_path / "half.ckpt")), unbroken) == 0


@pytest.mark.parametrize("game", often([Adapters, SharedBase, FollowingAdapters], [SharedBase]))
def test_it_travels_between_policies_and_is_saved_once(game, ranks, alone, tmp_path):
    first, second = str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    played(ranks, game, "zero3", 2, steps=3, save=first)
    played(ranks, game, "student=ddp,*=zero3", 2, steps=HALF, resume=first, save=second)
    assert distance(fit(game, "single", 1, resume=second), alone[game]) < EXACT
    saved = [value for value in read_checkpoint(second)["state_dict"].values() if isinstance(value, torch.Tensor)]
    assert sum(value.numel() for value in saved) == sum(weight.numel() for weight in game().parameters())
