"""What a player's recipes may return."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from gan.errors import UserError
from strategies import PhaseStrategy
from tests.support.hard_games import Plain
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
