"""Players and phases: what they refuse, and when a phase is due."""

import copy
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


@given(every=st.integers(1, 4), start=st.integers(0, 5), length=st.none() | st.integers(1, 9))
def test_due_every_so_many_steps_from_its_start_on_and_before_its_end(every, start, length):
    until = None if length is None else start + length
    phase = Phase("p", loss, "one", every=every, start=start, until=until)
    assert [step for step in range(20) if phase.due(step)] == list(range(start, 20 if until is None else until, every))
    assert phase.learners == ("one",) and Phase("p", loss, ["one", "two"]).learners == ("one", "two")


def test_when_is_asked_only_in_steps_that_are_due_otherwise():
    asked = []
    phase = Phase("p", loss, "one", every=2, start=1, when=lambda: bool(asked.append(1)) or len(asked) > 1)
    assert [step for step in range(6) if phase.due(step)] == [3, 5] and len(asked) == 3
    assert not Phase("p", loss, "one", when=lambda: True).due(0, ask=lambda phase: not phase.when())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Player("g", "net", sgd), "player 'g': expected a torch.nn.Module, got str"),
        (
            lambda: player(optimizer=SGD(nn.Linear(2, 2).parameters())),
            r"optimizer=SGD\(...\) is made already; give what makes it: optimizer=partial\(SGD, lr=1e-4\)",
        ),
        (
            lambda: player(schedule=StepLR(SGD(nn.Linear(2, 2).parameters()), 1)),
            r"schedule=StepLR\(...\) is made already; give what makes it: schedule=partial\(StepLR, ...\)",
        ),
        (
            lambda: Phase("fool", torch.zeros(()), "g"),
            "phase 'fool': its loss is a Tensor and no function of the batch",
        ),
        (lambda: Player("g", nn.DataParallel(nn.Linear(2, 2)), sgd), "its network is wrapped in DataParallel; leave"),
        (lambda: player(ema=1.0), r"ema=1.0 is not in \[0, 1\)"),
        (lambda: player(ema=lambda n: 2.0).decay(3), r"player 'one': ema\(3\) returned 2.0, which is not in \[0, 1\]"),
        (lambda: player(ema=0.9, ema_per="epoch"), "ema_per='epoch' is not known; type one of 'update', 'step'"),
        (lambda: player(ema_per="step"), "'one' has ema_per='step' and no ema; add ema=..., or leave it out"),
        (
            lambda: player(follows="two", ema=0.9),
            r"'one' follows 'two', so it has a decay and no optimizer; type Player\(",
        ),
        (lambda: player(optimizer=None, follows="two"), "follows 'two', so it has a decay and no optimizer"),
        (lambda: player(weights={}), "weights=dict must be the path of a safetensors file; type weights='model.safete"),
        (
            lambda: player(optimizer=None, follows="two", ema=0.9, weights="a.safetensors"),
            r"'one' begins as a copy of 'two', which it follows; give the weights to that one: Player\('two', ...",
        ),
        (
            lambda: player(saved=False),
            "'one' changes in training, so its weights must be in checkpoints; leave saved=F",
        ),
        (
            lambda: player(optimizer=None, follows="two", ema=0.9, saved=False),
            "'one' changes in training, so its weights must be in checkpoints",
        ),
        (lambda: player(clip=0), "clip=0 is not above 0"),
        (lambda: player(optimizer=None, ema=0.9), "'one' has no optimizer, so it is frozen and takes no schedule, ema"),
        (lambda: Player(nn.Linear(2, 2), "g", sgd), r"a player's name comes first: type Player\('generator', ...\)"),
        (lambda: Phase("p", loss, nn.Linear(2, 2)), "phase 'p': its learners are names of players"),
        (lambda: Phase("p", loss, "one", every=0), "phase 'p': every=0 must be a whole number, 1 or more"),
        (lambda: Phase("p", loss, "one", optimizer="adam"), "optimizer='adam' must be a function of weights"),
        (lambda: Phase("p", loss, "one", draws="numpy"), "phase 'p': draws='numpy' is not known; type draws='samples'"),
        (lambda: Phase("p", loss, "one", micro_batches=1.5), "micro_batches=1.5"),
        (lambda: Phase("p", loss, "one", start=-1), "phase 'p': start=-1 must be a whole number, 0 or more"),
        (
            lambda: Phase("p", loss, "one", start=5, until=5),
            "until=5 must be a whole number above start=5, or the phase",
        ),
        (
            lambda: Phase("p", loss, "one", when=True),
            "when=True must be a function without arguments; type when=lambda:",
        ),
        (
            lambda: player(freeze=["x"]),
            r"freeze=\['x'\] must be a function of the step; type freeze=lambda step: \['x'\]",
        ),
        (
            lambda: player(optimizer=None, freeze=lambda step: []),
            "is frozen and takes no schedule, ema, clip, after or",
        ),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(UserError, match=message):
        make()


shared = nn.Linear(2, 2)


def follower(module, follows="one"):
    return player("two", module, optimizer=None, follows=follows, ema=0.9)


def with_buffer(module):
    module.register_buffer("seen", torch.zeros(2))
    return module


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            nn.Linear(2, 3),
            r"'two' follows 'one', and parameter 'weight' is of shape \(3, 2\) in 'two' and of shape \(2, 2",
        ),
        (
            nn.Linear(2, 2, bias=False),
            "parameter 'bias' is none in 'two' and of shape .* give both the same network, e.g. c",
        ),
        (nn.Sequential(nn.Linear(2, 2)), "parameter '0.weight' is of shape .* and none in 'one'"),
        (with_buffer(nn.Linear(2, 2)), "buffer 'seen' is of shape .* in 'two' and none in 'one'"),
    ],
)
def test_a_player_that_follows_another_has_the_same_network(module, message):
    with pytest.raises(UserError, match=message):
        check_game([follower(module), player()], [Phase("p", loss, "one")])
    check_game([follower(nn.Linear(2, 2)), player()], [Phase("p", loss, "one")])
    check_game([player(module=nn.Sequential(shared, shared))], [Phase("p", loss, "one")])  # a layer may stand twice


@pytest.mark.parametrize(
    ("players", "phases", "message"),
    [
        ([], [Phase("p", loss, "one")], r"the game has no player; yield one from configure_players\(\)"),
        ([player()], [], "the game has no phase"),
        (["one"], [Phase("p", loss, "one")], r"configure_players\(\) gives a str; yield Player\(...\)s"),
        ([player()], [loss], r"configure_phases\(\) gives a function; yield Phase\(...\)s"),
        ([player(), player()], [Phase("p", loss, "one")], "two players are called 'one'"),
        ([player()], [Phase("p", loss, "one"), Phase("p", loss, "one")], "two phases are called 'p'"),
        ([player()], [Phase("p", loss, "two")], "phase 'p': unknown learner 'two'; known: one"),
        ([player()], [Phase("p", loss, ())], "phase 'p' has no learners; name one of: one"),
        ([player()], [Phase("p", loss, ("one", "one"))], "names learner 'one' twice"),
        ([player(optimizer=None)], [Phase("p", loss, "one")], "learner 'one' is frozen; give it an optimizer"),
        (
            [player(), follower(nn.Linear(2, 2), "three")],
            [Phase("p", loss, "one")],
            "player 'two' follows 'three', which is no player with an optimizer; known are one",
        ),
        ([player(module=nn.Tanh())], [Phase("p", loss, "one")], "has an optimizer but no parameter that requires"),
        (
            [player("a", nn.Sequential(shared)), player("b", nn.ModuleDict({"x": shared}))],
            [Phase("p", loss, "a")],
            r"parameter 'x.weight' of player 'b' is also '0.weight' of player 'a'",
        ),
    ],
)
def test_a_game_that_does_not_hold_together_is_refused(players, phases, message):
    with pytest.raises(UserError, match=message):
        check_game(players, phases)


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
    check_game([first, second, watching], [Phase("p", loss, "second")])


def test_two_that_learn_the_same_are_told_to_freeze_it():
    base = nn.Linear(2, 2)
    players = [player("a", nn.ModuleList([base, nn.Linear(2, 2)])), player("b", nn.ModuleList([nn.Tanh(), base]))]
    with pytest.raises(UserError, match=r"'1.weight' of player 'b' is also '0.weight' .* by requires_grad_\("):
        check_game(players, [Phase("p", loss, "a")])
    frozen(base)
    with pytest.raises(UserError, match="player 'b' has an optimizer but no parameter that requires a gradient"):
        check_game(players, [Phase("p", loss, "a")])


def test_a_follower_shares_all_frozen_parameters_or_none():
    def net(base, other, learning):
        return nn.ModuleDict({"base": base, "other": other, "learning": learning})

    base, other, own = frozen(nn.Linear(2, 2)), frozen(nn.Linear(2, 2)), nn.Linear(2, 2)
    one, phases = player(module=net(base, other, own)), [Phase("p", loss, "one")]
    check_game([follower(net(base, other, nn.Linear(2, 2))), one], phases)
    check_game([follower(copy.deepcopy(one.module)), one], phases)
    assert names_of(follower(net(base, other, nn.Linear(2, 2))), one)["one"][:2] == ["base.weight", "base.bias"]
    with pytest.raises(UserError, match=r"'base.weight' is a copy in 'two'; let both have all the same ones"):
        check_game([follower(net(copy.deepcopy(base), other, nn.Linear(2, 2))), one], phases)
    with pytest.raises(UserError, match=r"'base\.weight' is a copy in 'two'"):
        check_game([player("base", base, optimizer=None), one, follower(copy.deepcopy(one.module))], phases)
    with pytest.raises(UserError, match=r"both have the same parameter 'learning\.weight', which learns; copy it"):
        check_game([follower(net(base, other, own)), one], phases)
