"""Players and phases: what they refuse, and when a phase is due."""

import copy
import re
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from gan import Phase, Player
from gan.files.errors import UserError
from gan.phase import check_game, parameters_of

sgd = partial(SGD, lr=0.1)


def loss(batch):
    return batch


def player(name="one", module=None, **kwargs):
    return Player(name, module or nn.Linear(2, 2), **{"optimizer": sgd, **kwargs})


def phase(name="p", loss=loss, learners="one", **kwargs):
    return Phase(name, loss, learners, **kwargs)


@given(every=st.integers(1, 4), start=st.integers(0, 5), length=st.none() | st.integers(1, 9))
def test_due_every_so_many_steps_from_its_start_on_and_before_its_end(every, start, length):
    until = None if length is None else start + length
    each = phase(every=every, start=start, until=until)
    assert [step for step in range(20) if each.due(step)] == list(range(start, 20 if until is None else until, every))
    assert each.learners == ("one",) and phase(learners=["one", "two"]).learners == ("one", "two")


def test_when_is_asked_only_in_steps_that_are_due_otherwise():
    asked = []
    each = phase(every=2, start=1, when=lambda: bool(asked.append(1)) or len(asked) > 1)
    assert [step for step in range(6) if each.due(step)] == [3, 5] and len(asked) == 3
    assert not phase(when=lambda: True).due(0, ask=lambda phase: not phase.when())


MADE = SGD(nn.Linear(2, 2).parameters())
FOLLOWS = dict(optimizer=None, follows="two", ema=0.9)
PLAYERS = [
    (dict(module="net"), "player 'one': expected a torch.nn.Module, got str"),
    (dict(optimizer=MADE), "optimizer=SGD(...) is made already; give what makes it: optimizer=partial(SGD, lr=1e-4)"),
    (dict(schedule=StepLR(MADE, 1)), "=StepLR(...) is made already; give what makes it: schedule=partial(StepLR, ...)"),
    (dict(module=nn.DataParallel(nn.Linear(2, 2))), "its network is wrapped in DataParallel; leave"),
    (dict(ema=1.0), "ema=1.0 is not in [0, 1)"),
    (dict(ema=0.9, ema_per="epoch"), "ema_per='epoch' is not known; type one of 'update', 'step'"),
    (dict(ema_per="step"), "'one' has ema_per='step' and no ema; add ema=..., or leave it out"),
    (dict(follows="two", ema=0.9), "'one' follows 'two', so it has a decay and no optimizer; type Player("),
    (dict(optimizer=None, follows="two"), "follows 'two', so it has a decay and no optimizer"),
    (dict(weights={}), "weights=dict must be the path of a safetensors file; type weights='model.safe"),
    (FOLLOWS | dict(weights="a"), "copy of 'two', which it follows; give the weights to that one: Player('two', ..."),
    (dict(saved=False), "'one' changes in training, so its weights must be in checkpoints; leave saved=F"),
    (FOLLOWS | dict(saved=False), "'one' changes in training, so its weights must be in checkpoints"),
    (dict(clip=0), "clip=0 is not above 0"),
    (dict(optimizer=None, ema=0.9), "'one' has no optimizer, so it is frozen and takes no schedule, ema"),
    (dict(name=nn.Tanh(), module="g"), "a player's name comes first: type Player('generator', ...)"),
    (dict(freeze=["x"]), "freeze=['x'] must be a function of the step; type freeze=lambda step: ['x']"),
    (dict(optimizer=None, freeze=lambda step: []), "is frozen and takes no schedule, ema, clip, after or"),
]
PHASES = [
    (dict(loss=torch.zeros(())), "phase 'p': its loss is a Tensor and no function of the batch"),
    (dict(learners=nn.Linear(2, 2)), "phase 'p': its learners are names of players"),
    (dict(every=0), "phase 'p': every=0 must be a whole number, 1 or more"),
    (dict(optimizer="adam"), "optimizer='adam' must be a function of weights"),
    (dict(draws="numpy"), "phase 'p': draws='numpy' is not known; type draws='samples'"),
    (dict(micro_batches=1.5), "micro_batches=1.5"),
    (dict(start=-1), "phase 'p': start=-1 must be a whole number, 0 or more"),
    (dict(start=5, until=5), "until=5 must be a whole number above start=5, or the phase"),
    (dict(when=True), "when=True must be a function without arguments; type when=lambda:"),
    (dict(update=0.8), "update=0.8 must be a function without arguments; type update=lambda:"),
]


@pytest.mark.parametrize(
    ("make", "given", "words"), [(player, *each) for each in PLAYERS] + [(phase, *each) for each in PHASES]
)
def test_a_setting_that_makes_no_sense_is_refused(make, given, words):
    with pytest.raises(UserError, match=re.escape(words)):
        make(**given)


def test_a_decay_that_makes_no_sense_is_refused_when_it_is_asked_for():
    with pytest.raises(UserError, match=r"player 'one': ema\(3\) returned 2.0, which is not in \[0, 1\]"):
        player(ema=lambda n: 2.0).decay(3)


shared = nn.Linear(2, 2)


def follower(module, follows="one"):
    return player("two", module, **FOLLOWS | {"follows": follows})


def with_buffer(module):
    module.register_buffer("seen", torch.zeros(2))
    return module


OTHERS = [
    (nn.Linear(2, 3), r"'two' follows 'one', and parameter 'weight' is of shape \(3, 2\) in 'two' and of shape \(2, 2"),
    (nn.Linear(2, 2, bias=False), "'bias' is none in 'two' and of shape .* give both the same network, e.g. c"),
    (nn.Sequential(nn.Linear(2, 2)), "parameter '0.weight' is of shape .* and none in 'one'"),
    (with_buffer(nn.Linear(2, 2)), "buffer 'seen' is of shape .* in 'two' and none in 'one'"),
]
IN_TWO = player("a", nn.Sequential(shared)), player("b", nn.ModuleDict({"x": shared}))
GAMES = [
    ([], [phase()], r"the game has no player; yield one from configure_players\(\)"),
    ([player()], [], "the game has no phase"),
    (["one"], [phase()], r"configure_players\(\) gives a str; yield Player\(...\)s"),
    ([player()], [loss], r"configure_phases\(\) gives a function; yield Phase\(...\)s"),
    ([player(), player()], [phase()], "two players are called 'one'"),
    ([player()], [phase(), phase()], "two phases are called 'p'"),
    ([player()], [phase(learners="two")], "phase 'p': unknown learner 'two'; known: one"),
    ([player()], [phase(learners=())], "phase 'p' has no learners; name one of: one"),
    ([player()], [phase(learners=("one", "one"))], "names learner 'one' twice"),
    ([player(optimizer=None)], [phase()], "learner 'one' is frozen; give it an optimizer"),
    ([player(), follower(shared, "three")], [phase()], "'two' follows 'three', which is no player .*; known are one"),
    ([player(module=nn.Tanh())], [phase()], "has an optimizer but no parameter that requires"),
    ([player(module=nn.Linear(2, 2).requires_grad_(False))], [phase()], "has an optimizer but no parameter that requi"),
    (IN_TWO, [phase(learners="a")], r"'x.weight' of player 'b' is also '0.weight' of player 'a'.* by requires_grad_\("),
    *(([follower(module), player()], [phase()], words) for module, words in OTHERS),
]


@pytest.mark.parametrize(("players", "phases", "words"), GAMES)
def test_a_game_that_does_not_hold_together_is_refused(players, phases, words):
    with pytest.raises(UserError, match=words):
        check_game(players, phases)


def test_the_control_a_player_follows_its_like_and_a_layer_may_stand_twice():
    check_game([follower(nn.Linear(2, 2)), player()], [phase()])
    check_game([player(module=nn.Sequential(shared, shared))], [phase()])


def frozen(module):
    return module.requires_grad_(False)


def names_of(*players):
    return {name: list(parameters) for name, parameters in parameters_of(players).items()}


def test_a_parameter_is_stored_by_the_player_that_changes_it_or_else_by_the_first():
    base, head = frozen(nn.Linear(2, 2)), nn.Linear(2, 2)
    both = nn.ModuleDict({"base": base, "head": head})
    first, second = player("first", base, optimizer=None), player("second", both)
    base_there, head_there = ["base.weight", "base.bias"], ["head.weight", "head.bias"]
    assert names_of(first, second) == {"first": ["weight", "bias"], "second": head_there}
    assert names_of(second, first) == {"second": [*base_there, *head_there], "first": []}
    # A frozen player that has what another one learns stores it not, whichever comes first.
    watching = player("watching", both, optimizer=None)
    assert names_of(watching, player("list", nn.ParameterList(head.parameters()))) == {
        "watching": base_there,
        "list": ["0", "1"],
    }
    check_game([first, second, watching], [phase(learners="second")])


def test_a_follower_shares_all_frozen_parameters_or_none():
    def net(base, other, learning):
        return nn.ModuleDict({"base": base, "other": other, "learning": learning})

    base, other, own = frozen(nn.Linear(2, 2)), frozen(nn.Linear(2, 2)), nn.Linear(2, 2)
    one, phases = player(module=net(base, other, own)), [phase()]
    check_game([follower(net(base, other, nn.Linear(2, 2))), one], phases)
    check_game([follower(copy.deepcopy(one.module)), one], phases)
    assert names_of(follower(net(base, other, nn.Linear(2, 2))), one)["one"][:2] == ["base.weight", "base.bias"]
    with pytest.raises(UserError, match=r"'base.weight' is a copy in 'two'; let both have all the same ones"):
        check_game([follower(net(copy.deepcopy(base), other, nn.Linear(2, 2))), one], phases)
    with pytest.raises(UserError, match=r"'base\.weight' is a copy in 'two'"):
        check_game([player("base", base, optimizer=None), one, follower(copy.deepcopy(one.module))], phases)
    with pytest.raises(UserError, match=r"both have the same parameter 'learning\.weight', which learns; copy it"):
        check_game([follower(net(base, other, own)), one], phases)
