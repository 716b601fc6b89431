"""Replicas: networks of their own, whatever leads to them."""

import functools
import sys
import threading
import types
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm as old_spectral_norm

from gan import Player
from gan.files.errors import UserError
from strategies.policies.replica import Replica
from tests.support.hard_games import Plain, TwoForwards, mlp
from tests.support.parity import EXACT, distance, train

CPU = torch.device("cpu")


def replica(game):
    game.assemble()
    return Replica(game, CPU, 1, CPU)


# ---- networks of their own ----


def test_a_replica_has_the_same_names_and_values_and_no_memory_in_common():
    game = TwoForwards()
    own = replica(game).game
    assert type(own) is type(game)
    assert [name for name, _ in own.named_parameters()] == [name for name, _ in game.named_parameters()]
    for kind in ("parameters", "buffers"):
        pairs = list(zip(getattr(own, kind)(), getattr(game, kind)(), strict=True))
        assert pairs
        for one, other in pairs:
            assert torch.equal(one, other) and one.data_ptr() != other.data_ptr()
            assert type(one) is type(other) and one.requires_grad == other.requires_grad and one.is_leaf
    assert not set(own.modules()) & set(game.modules())


def test_the_first_replica_is_the_game_itself():
    game = Plain()
    first = Replica(game, CPU, 0, CPU)
    assert first.game is game
    weight = game.generator[0].weight
    assert first.of(weight) is weight and first.own(game.generator) is game.generator
    assert not first.stands_for(game.generator)


def test_it_is_on_its_device():
    game = Plain()
    game.assemble()
    own = Replica(game, torch.device("meta"), 1, CPU).game
    assert {p.device.type for p in own.parameters()} == {"meta"}
    assert own.device == torch.device("meta")
    assert game.device == CPU


def test_it_follows_weights_buffers_and_structure():
    game = TwoForwards()
    mine = replica(game)
    own = mine.game
    game.generator[0].weight.data.fill_(3.0)  # past autograd's sight
    (buffer, *_), (copy, *_) = game.buffers(), own.buffers()
    with torch.no_grad():
        buffer.fill_(4.0)
        copy.fill_(5.0)
    game.generator.append(nn.Linear(6, 6))
    game.register_buffer("new", torch.ones(2))
    game.train(False)
    mine.follow()
    assert own.generator[0].weight.eq(3).all() and copy.eq(4).all()
    assert torch.equal(own.generator[3].weight, game.generator[3].weight)
    assert own.generator[3].weight is not game.generator[3].weight
    assert own.new is not game.new and not own.generator.training
    del game.new
    mine.follow()
    assert not hasattr(own, "new")


def test_it_takes_only_the_weights_that_it_is_told_to():
    game = Plain()
    mine = replica(game)
    for weight in game.parameters():
        weight.data.fill_(3.0)
    mine.take(game.generator.parameters())
    assert all(weight.eq(3).all() for weight in mine.game.generator.parameters())
    assert not any(weight.eq(3).all() for weight in mine.game.discriminator.parameters())


def test_a_graph_survives_new_weights_as_on_one_device():
    game = Plain()
    mine = replica(game)
    own = mine.game.generator
    out = own(torch.ones(2, 4)).sum()
    mine.follow()
    out.backward()
    assert own[0].weight.grad is not None and game.generator[0].weight.grad is None


# ---- whatever leads to a network ----


@dataclass
class Box:
    """An object of the author's."""

    net: nn.Module
    other: object = None


def leading(game):
    """Many ways to a network."""
    net = game.generator

    box = Box(net)
    box.other = box
    return {
        "attribute": (net, lambda x: x),
        "list": ([net], lambda x: x[0]),
        "dict": ({"a": {"b": (net,)}}, lambda x: x["a"]["b"][0]),
        "set": ({net}, lambda x: next(iter(x))),
        "method": (net.forward, lambda x: x.__self__),
        "partial": (functools.partial(net.forward), lambda x: x.func.__self__),
        "object": (Box(Box(net)), lambda x: x.net.net),
        "circle": (box, lambda x: x.other.other.net),
        "player": ({"p": Player("p", net)}, lambda x: x["p"].module),
    }


@pytest.mark.parametrize("name", leading(Plain()))
def test_every_way_leads_to_the_replicas_network(name):
    game = Plain()
    value, reach = leading(game)[name]
    vars(game)["way"] = value
    own = replica(game).game
    assert reach(game.way) is game.generator
    assert reach(own.way) is own.generator


def test_phases_play_on_the_replica():
    game = Plain()
    own = replica(game).game
    assert [phase.loss.__self__ for phase in own.phases] == [own, own]
    assert own.players["generator"].module is own.generator
    assert game.players["generator"].module is game.generator


def test_a_network_hidden_in_a_list_has_a_replica_too():
    game = Plain()
    game.hidden = [mlp(2, 2)]
    mine = replica(game)
    assert mine.game.hidden[0] is not game.hidden[0]
    game.hidden[0][0].weight.data.fill_(2.0)
    mine.follow()
    assert mine.game.hidden[0][0].weight.eq(2).all()


def test_classes_and_python_modules_are_shared():
    game = Plain()
    game.kind, game.module = Box, functools
    own = replica(game).game
    assert own.kind is Box and own.module is functools


# ---- what cannot be copied is refused ----


def holding(game):
    """Functions that keep the author's network, each in its way."""
    net = game.generator

    def closure():
        return net

    def recursive(deep=False):
        return net if deep else recursive(True)

    def default(chosen=net):
        return chosen

    def named(*, chosen=net):
        return chosen

    def outer():
        return closure()

    return {
        "closure": (closure, "net"),
        "recursive": (recursive, "net"),
        "default": (default, "chosen"),
        "named": (named, "chosen"),
        "outer": (outer, "closure"),
        "partial": (functools.partial(closure), "net"),
        "patched": (types.MethodType(lambda self: net, game), "net"),
        "method": (lambda method=net.forward: method(), "method"),
        "list": (lambda nets=(net,): nets, "nets"),
        "in a list": ([closure], "net"),
        "in a tuple": ((closure,), "net"),
        "in an object": (Box(net, closure), "net"),
    }


@pytest.mark.parametrize("name", holding(Plain()))
def test_a_function_that_holds_a_network_is_refused_by_name(name):
    game = Plain()
    vars(game)["way"], held = holding(game)[name]
    message = rf"cannot copy the function holding.*, for it holds '{held}' of the first device; .* --strategy ddp"
    with pytest.raises(UserError, match=message):
        replica(game)


def test_a_hook_that_holds_the_game_is_refused_also_between_steps():
    game = Plain()
    game.features = []
    features = game.features
    game.discriminator.register_forward_hook(lambda module, inputs, output: features.append(output))
    with pytest.raises(UserError, match="<lambda>, for it holds 'features' of the first device"):
        replica(game)
    game = Plain()
    mine = replica(game)
    game.discriminator.register_forward_hook(lambda module, inputs, output: game.generator)
    with pytest.raises(UserError, match="<lambda>, for it holds 'game' of the first device"):
        mine.follow()


def test_a_function_that_holds_what_no_step_changes_is_shared():
    rate, device, kind = 0.5, torch.device("cpu"), torch.float32
    game = Plain()
    game.scale = lambda x, by=(1, 2): (x * rate).to(device, kind) * by[0]
    assert replica(game).game.scale is game.scale


@pytest.mark.parametrize("extra", [threading.Lock(), sys.stdout, (x for x in ())])
def test_what_deepcopy_cannot_copy_is_refused_by_name(extra):
    game = Plain()
    game.discriminator.extra = extra
    with pytest.raises(
        UserError, match=r"cannot copy 'discriminator.extra' for another device: cannot pickle .* --strategy"
    ):
        replica(game)


def test_random_generators_are_their_own_and_begin_alike():
    game = Plain()
    game.dice = torch.Generator().manual_seed(3)
    own = replica(game).game
    assert own.dice is not game.dice
    assert torch.equal(torch.randn(3, generator=own.dice), torch.randn(3, generator=game.dice))


# ---- what steps assign, and what others do between them ----


def test_what_a_step_assigns_stays_and_what_comes_between_steps_goes_to_all():
    game = Plain()
    game.number, game.settings, game.kept = 1, {"a": 1}, [1]
    mine = replica(game)
    own = mine.game
    game.number, own.number = 10, 20  # by a step
    game.kept.append(10)
    own.kept.append(20)
    mine.note()
    mine.follow()
    assert (own.number, own.kept) == (20, [1, 20])
    game.settings["a"] = 2  # between steps
    game.number = 3
    mine.follow()
    assert (own.number, own.settings, own.kept) == (3, {"a": 2}, [1, 20])
    assert own.settings is not game.settings
    del game.number
    mine.follow()
    assert not hasattr(own, "number")


def test_a_tensor_with_a_graph_is_copied_without_it():
    game = Plain()
    mine = replica(game)
    game.kept = game.generator(torch.ones(2, 4))
    mine.follow()
    assert torch.equal(mine.game.kept, game.kept) and mine.game.kept.is_leaf


def test_a_tensor_that_nobody_changed_between_steps_stays_the_replicas_own():
    game = Plain()
    game.kept = torch.zeros(())
    for _ in range(300):  # a version that Python keeps no single int object for
        game.kept.add_(1)
    mine = replica(game)
    mine.game.kept.fill_(5)
    mine.follow()
    assert mine.game.kept == 5
    game.kept.add_(1)
    mine.follow()
    assert mine.game.kept == 301


def test_one_list_in_two_places_is_one_list_in_the_replica():
    game = Plain()
    game.features = []
    game.kept = {"features": game.features}
    own = replica(game).game
    own.kept["features"].append(1)
    assert own.features == [1] and game.features == []


# ---- layers that keep their weights in other places ----


class Recurrent(Plain):
    """An LSTM has its weights in lists as well; an old spectral norm makes its weight in every forward."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.discriminator = Reader(nn.LSTM(3, 4, batch_first=True), old_spectral_norm(nn.Linear(4, 1)))


class Reader(nn.Module):
    def __init__(self, lstm, score):
        super().__init__()
        self.lstm, self.score = lstm, score

    def forward(self, x):
        return self.score(self.lstm(x.view(-1, 2, 3))[0][:, -1])


class Tied(Plain):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        first = nn.Linear(6, 6)
        self.discriminator = nn.ModuleDict({"a": first, "b": first, "score": nn.Linear(6, 1)})
        self.weights = [first.weight]

    def judge(self, batch):
        x = torch.tanh(self.discriminator["b"](torch.tanh(self.discriminator["a"](batch["x"]))))
        decay = sum(p.square().sum() for p in self.discriminator.parameters()) + self.weights[0].sum()
        return self.discriminator["score"](x).square().mean() + 0.01 * decay

    def fool(self, batch):
        return self.fake(batch["x"]).square().mean()


@pytest.mark.parametrize("game", [Recurrent, Tied])
def test_parity(game):
    alone = train(game, policy="single")
    for devices in (2, 4):
        assert distance(train(game, policy="dp", devices=devices), alone) < EXACT
