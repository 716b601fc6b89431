"""A game in words."""

from dataclasses import replace

import pytest

from gan.app.fitting.card import describe
from tests.scenes.optimizers import Informed
from tests.support.hard_games import Every, Micro2, Teacher
from tests.support.sharing_games import Adapters, SharedBase


class Unsaved(Teacher):
    def configure_players(self):
        for player in super().configure_players():
            yield replace(player, saved=player.name != "teacher")


RECIPE = "Adam(lr=0.01, betas=(0.5, 0.9)), with a schedule, ema 0.8, clip 0.1"
GAMES = {
    Teacher: [
        "game Teacher",
        f"generator: 94 parameters, {RECIPE}",
        "    0: Linear, 40",
        "teacher: 54 parameters, frozen",
    ],
    Unsaved: ["teacher: 54 parameters, frozen, not in checkpoints"],
    # what a player has and another one stores
    SharedBase: [
        "student: 232 parameters, 80 of them learn, Adam(",
        "fake: 272 parameters, 120 of them learn, 152 of them stored by student, Adam(",
        "teacher: 152 parameters, 152 of them stored by student, frozen",
    ],
    Adapters: ["teacher: 276 parameters, 72 of them stored by student, 72 of them stored by fake, frozen"],
    # phases in their order, and with optimizers of their own
    Informed: ["  inform: teaches generator, judge; every 2 steps; by Adam(lr=0.01, betas=(0.5, 0.999))"],
    Every: ["  discriminator: teaches discriminator\n  generator: teaches generator; every 3 steps\nno more"],
    Micro2: ["  generator: teaches generator; in 2 micro-batches"],
}


@pytest.mark.parametrize("game", GAMES)
def test_it_names_players_with_sizes_and_recipes_and_phases_in_their_order(game):
    text = f"{describe(game())}no more"
    assert [words for words in GAMES[game] if words not in text] == []
