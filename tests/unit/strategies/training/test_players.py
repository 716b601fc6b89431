"""What each player gets: policies and options, and what its functions have made."""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, Muon
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from gan import Player
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.checkpoint.first_weights import refuse_one_memory
from strategies.optimizers.stepped_apart import why_not_apart
from strategies.policies.belongings import belongings_of
from strategies.policies.choice import Choice, Option, choices
from strategies.policies.policy import Policy
from tests.support.hard_games import Plain
from tests.support.optimizers import Shampoo
from tests.support.parity import distance, parts, snapshot, train, trainer, warned
from tests.support.scene import having

# ---- choice ----


class One(Policy):
    name = "one"
    takes = frozenset({"big", "split"})


class Other(Policy):
    name = "other"
    takes = frozenset({"split"})


KNOWN = {"one": One, "other": Other}


@pytest.fixture(autouse=True)
def options():
    known = {"big": Option("is big"), "split": Option("how many", int, default=4), "lone": Option("of no policy")}
    with mock.patch.dict("strategies.policies.choice.OPTIONS", known, clear=True):
        yield


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("one", {"*": Choice("one")}),
        ("one+big", {"*": Choice("one", {"big": None})}),
        ("one+big+split:2", {"*": Choice("one", {"big": None, "split": 2})}),
        ("a=one+split,*=other", {"a": Choice("one", {"split": 4}), "*": Choice("other")}),
        (" a = one + big , b = other ", {"a": Choice("one", {"big": None}), "b": Choice("other")}),
        ({"a": "one+split:8", "*": "other"}, {"a": Choice("one", {"split": 8}), "*": Choice("other")}),
    ],
)
def test_a_choice_is_a_policy_and_its_options(typed, read):
    assert choices(typed, KNOWN) == read


# ---- optimizers ----


class Sam(SGD):
    """As the published one: only a step shows that it needs a closure."""

    def step(self, closure=None):
        assert closure is not None, "Sharpness Aware Minimization requires closure, but it was not provided"


def with_recipe(of=None, frozen=False, **recipe):
    """Plain with another discriminator. `of` makes its optimizer from the game; `frozen`: one of its biases is."""

    class Game(Plain):
        def configure_players(self):
            generator, discriminator = super().configure_players()
            self.discriminator[0].bias.requires_grad_(not frozen)
            yield generator
            yield replace(discriminator, **recipe if of is None else {"optimizer": of(self)})

    return Game


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"optimizer": LBFGS}, "player 'discriminator': LBFGS computes the loss several times in a step, by a closure"),
        ({"optimizer": partial(Sam, lr=0.1)}, "player 'discriminator': Sam computes the loss several times in a step"),
        ({"optimizer": lambda w: {"optimizer": Adam(w)}}, "its function for the optimizer returned dict; it must ret"),
        ({"optimizer": lambda w: Adam([nn.Parameter(torch.zeros(3))])}, r"a parameter that is not the player's \(sha"),
        (
            {"of": lambda game: lambda _: Adam(game.discriminator.parameters()), "frozen": True},
            r"took '0.bias', which requires no gradient \(shape \(8,\)\)",
        ),
        ({"schedule": partial(ReduceLROnPlateau, patience=2)}, "returned ReduceLROnPlateau, which needs a score"),
        ({"schedule": lambda o: [StepLR(o, 1)]}, "function for the schedule returned list, which is no LRScheduler"),
    ],
)
def test_what_cannot_be_stepped_is_refused(recipe, message):
    with pytest.raises(UserError, match=message):
        train(with_recipe(**recipe), policy="single", steps=1)


def test_an_optimizer_may_be_made_of_named_parameters_or_leave_some_out():
    named = with_recipe(of=lambda game: lambda _: Adam(game.discriminator.named_parameters(), lr=2e-2))
    assert distance(train(named, policy="single"), train(Plain, policy="single")) == 0
    game = with_recipe(optimizer=lambda weights: Adam([w for w in weights if w.ndim > 1], lr=2e-2))()
    before, strategy = game.discriminator[0].bias.detach().clone().double(), PhaseStrategy("single")
    trainer(strategy, 1, 2).fit(game, parts(2))
    assert torch.equal(game.discriminator[0].bias, before) and snapshot(game, strategy)


# ---- a trial of an optimizer ----


class Whole(SGD):
    @torch.compile(fullgraph=True)
    def scaled(self, gradient):
        return 2 * gradient

    def step(self, closure=None):
        for weight in self.param_groups[0]["params"]:
            weight.grad = self.scaled(weight.grad)
        super().step(closure)


def picky(weights):
    optimizer = SGD(weights, lr=1e-2)
    optimizer.step = lambda: torch.cat([w.grad.reshape(-1) for w in optimizer.param_groups[0]["params"]]).reshape(6, 9)
    return optimizer


def test_an_optimizer_that_treats_each_weight_by_itself_is_known_by_a_trial():
    """The scenes of whole weights have the others."""
    layers = nn.Linear(4, 6, bias=False), nn.Linear(6, 5, bias=False)
    weights = dict(nn.Sequential(*layers).named_parameters())
    for optimizer in (Adafactor, Adagrad, Whole, Muon, type("Own", (Adam,), {})):
        assert why_not_apart(partial(optimizer, lr=1e-2), weights) is None
    assert why_not_apart(picky, weights).startswith("it fails if it has only some of the weights (RuntimeError: ")
    with pytest.raises(TypeError, match="closure"):  # of which `without_closure` makes a sentence
        why_not_apart(LBFGS, weights)


class Counts(Adam):
    """As PSGD Kron. It has a cache and a flag too, which tell nothing."""

    def __init__(self, weights):
        super().__init__(weights, lr=1e-2)
        self.steps, self.cache, self.begun = torch.zeros((), dtype=torch.int32), None, False

    def step(self, closure=None):
        self.steps += 1
        self.cache, self.begun, self.size = 3, True, 4
        super().step(closure)


class Extrapolates(Adam):
    """As ExtraAdam: every other step begins where the one before has begun. It has a list of the weights, too."""

    def __init__(self, weights):
        super().__init__(weights, lr=1e-2)
        self.copies, self.all = [], self.param_groups[0]["params"][:2]

    @torch.no_grad()
    def step(self, closure=None):
        copies, self.copies = self.copies, []
        if not copies:
            self.copies = [weight.clone() for weight in self.param_groups[0]["params"]]
        for weight, copy in zip(self.param_groups[0]["params"], copies, strict=False):
            weight.copy_(copy)
        super().step(closure)


NOT_SAVED = {
    Counts: "a step of Counts changes its attribute 'steps', which is not in a checkpoint, so a resumed run begins "
    "with 0 again",
    Extrapolates: "a step of Extrapolates changes tensors in its 'copies', which are not in a checkpoint, so a "
    "resumed run begins without them",
}


@pytest.mark.parametrize("optimizer", [*NOT_SAVED, Adam, Shampoo])
def test_what_an_optimizer_keeps_beside_checkpoints_is_told(optimizer):
    schedule = partial(StepLR, step_size=1)
    game = having(
        Plain,
        configure_players=lambda game: [
            Player("generator", game.generator, optimizer, schedule=schedule),
            Player("discriminator", game.discriminator, Adam),
        ],
    )
    with warned("not in a checkpoint") as told:
        train(game, policy="single", steps=2)
    words = NOT_SAVED.get(optimizer)
    assert [each.partition(";")[0] for each in told] == ([f"player 'generator': {words}"] if words else [])


# ---- belongings ----


def of(game):
    players = {player.name: player for player in game.configure_players()}
    return belongings_of(players, game)


class Unshaped(Plain):
    called = False

    def __init__(self):
        super().__init__()
        self.discriminator = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))
        if self.called:
            self.discriminator(torch.zeros(2, 6))


def test_a_network_without_shapes_is_refused_until_it_is_called():
    with pytest.raises(UserError, match=r"'discriminator.0.weight' has no shape.*; call the network once where it is"):
        train(Unshaped, policy="single", steps=1)
    train(type("Shaped", (Unshaped,), {"called": True}), policy="single", steps=1)


class Graph(Plain):
    """Its networks pass messages along the edges of a mesh."""

    as_buffer = True

    def __init__(self):
        super().__init__()
        edges = torch.eye(6, dtype=torch.float64).to_sparse()
        if self.as_buffer:
            self.discriminator.register_buffer("edges", edges)
        else:
            self.edges = edges


def test_a_sparse_buffer_is_refused_and_a_plain_attribute_is_not():
    with pytest.raises(UserError, match=r"'discriminator.edges' is sparse, and a checkpoint has dense tensors; keep"):
        train(Graph, policy="single", steps=1)
    train(having(Graph, as_buffer=False), policy="single", steps=1)


def tied(kind):
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    one, other = net
    if kind in ("data", "turned"):
        other.weight.data = one.weight.data if kind == "data" else one.weight.data.t()
    elif kind == "parameter":
        other.weight = one.weight
    elif kind == "parts":
        one.weight.data, other.weight.data = torch.zeros(2, 2, 2)
    return net


def test_weights_that_are_two_in_one_memory_are_refused():
    for kind in ("data", "turned"):
        with pytest.raises(UserError, match=r"weights '0.weight' and '1.weight' are in one memory"):
            refuse_one_memory(tied(kind))
    for kind in ("parameter", "parts", "none"):
        refuse_one_memory(tied(kind))
