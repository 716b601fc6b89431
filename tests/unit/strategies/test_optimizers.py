"""What a player's recipes may return, and which optimizers can step some of the weights without the others."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, Muon
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from gan import Player
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.optimizers import LossScale, why_not_apart
from tests.support.hard_games import Plain
from tests.support.matrix_optimizers import Drawing, MuonAndAdam, NormedTogether, Shampoo
from tests.support.parity import distance, parts, snapshot, train, trainer


class Modes(SGD):
    """As a schedule-free optimizer has them."""

    def train(self):
        pass

    def eval(self):
        pass


def with_recipe(**recipe):
    class Game(Plain):
        def configure_players(self):
            generator, discriminator = super().configure_players()
            yield generator
            yield replace(discriminator, **{k: v(self) if k == "of" else v for k, v in recipe.items()})

    return Game


def names(game):
    return lambda weights: Adam(game.discriminator.named_parameters(), lr=2e-2)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"optimizer": LBFGS}, "player 'discriminator': LBFGS computes the loss several times in a step, by a closure"),
        ({"optimizer": partial(Modes, lr=0.1), "ema": 0.9}, "Modes keeps an average itself, which its eval.. shows"),
        ({"optimizer": lambda w: {"optimizer": Adam(w)}}, "its function for the optimizer returned dict; it must ret"),
        ({"optimizer": lambda w: Adam([nn.Parameter(torch.zeros(3))])}, r"a parameter that is not the player's \(sha"),
        ({"schedule": partial(ReduceLROnPlateau, patience=2)}, "returned ReduceLROnPlateau, which needs a score"),
        ({"schedule": lambda o: [StepLR(o, 1)]}, "function for the schedule returned list, which is no LRScheduler"),
    ],
)
def test_what_cannot_be_stepped_is_refused(recipe, message):
    with pytest.raises(UserError, match=message):
        train(with_recipe(**recipe), policy="single", steps=1)


def test_a_frozen_parameter_in_the_optimizer_is_named():
    class Game(Plain):
        def __init__(self):
            super().__init__()
            self.discriminator[0].bias.requires_grad_(False)

        def configure_players(self):
            generator, discriminator = super().configure_players()
            yield generator
            yield replace(discriminator, optimizer=lambda _: Adam(self.discriminator.parameters()))

    with pytest.raises(UserError, match=r"took '0.bias', which requires no gradient \(shape \(8,\)\)"):
        train(Game, policy="single", steps=1)


class Named(Plain):
    """An optimizer that is made of named parameters."""

    def configure_players(self):
        generator, discriminator = super().configure_players()
        yield generator
        yield replace(discriminator, optimizer=lambda _: Adam(self.discriminator.named_parameters(), lr=2e-2))


def test_an_optimizer_may_be_made_of_named_parameters():
    assert distance(train(Named, policy="single"), train(Plain, policy="single")) == 0


def test_some_weights_may_be_left_out():
    class Game(Plain):
        def configure_players(self):
            generator, discriminator = super().configure_players()
            yield generator
            yield replace(discriminator, optimizer=lambda weights: Adam([w for w in weights if w.ndim > 1], lr=2e-2))

    game, strategy = Game(), PhaseStrategy("single")
    before = game.discriminator[0].bias.detach().clone().double()
    trainer(strategy, 1, 2).fit(game, parts(2))
    assert torch.equal(game.discriminator[0].bias, before)
    assert snapshot(game, strategy)


# ---- a trial of an optimizer ----


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 5, bias=False))


def why(optimizer, net=None):
    net = net or network()
    return why_not_apart(Player("net", net, optimizer), dict(net.named_parameters()))


class Own(Adam):
    """A class of one's own."""


class Counting(SGD):
    """Its rate depends on how many weights it has."""

    def step(self, closure=None):
        before, group = self.param_groups[0]["lr"], self.param_groups[0]
        group["lr"] = before / len(group["params"])
        super().step(closure)
        group["lr"] = before


@pytest.mark.parametrize("optimizer", [Shampoo, Adafactor, Adagrad, Adam, Own, partial(MuonAndAdam, lr=1e-2)])
def test_these_treat_each_weight_by_itself(optimizer):
    assert why(optimizer) is None


def test_muon_on_matrices_does():
    assert why(partial(Muon, lr=1e-2), nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 5, bias=False))) is None


@pytest.mark.parametrize("optimizer", [NormedTogether, Drawing, partial(Counting, lr=1e-2)])
def test_these_do_not(optimizer):
    assert why(optimizer).startswith("its step on weight '")


def test_one_that_fails_with_some_of_the_weights_says_how():
    def picky(weights):
        optimizer = SGD(weights, lr=1e-2)
        optimizer.step = lambda: torch.cat([w.grad.reshape(-1) for w in optimizer.param_groups[0]["params"]]).reshape(7)
        return optimizer

    assert why(picky).startswith("it fails if it has only some of the weights (RuntimeError: ")
    assert why(LBFGS).startswith("it fails if")


def test_an_optimizer_that_exists_already_is_left_alone():
    net = network()
    optimizer = Shampoo(net.parameters())
    assert "returns the same optimizer twice" in why(lambda _: optimizer, net)
    assert not optimizer.state


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_weights_and_random_numbers_are_as_before(dtype):
    net = network().to(dtype)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    places = [weight.data_ptr() for weight in net.parameters()]
    torch.manual_seed(3)
    drawn = torch.rand(3)
    torch.manual_seed(3)
    assert why(Drawing, net)
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert [weight.data_ptr() for weight in net.parameters()] == places
    assert all(weight.grad is None for weight in net.parameters())


# ---- the loss scale, which follows the rule of torch's GradScaler ----


def test_a_scale_falls_at_once_and_grows_after_a_row_of_good_updates():
    finite = [True] * 3 + [False] + [True] * 7 + [False, False] + [True] * 4
    ours = LossScale(2.0**8, growth_interval=3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    for good in finite:
        scaler.scale(weight.sum())
        weight.grad = torch.ones(1) if good else torch.full((1,), float("inf"))
        scaler.step(optimizer)
        scaler.update()
        ours.update(good)
        assert ours.scale == scaler.get_scale()


def test_the_state_of_a_scale_travels():
    scale = LossScale()
    scale.update(False)
    scale.update(True)
    other = LossScale()
    other.load_state_dict(scale.state_dict())
    assert other == scale
