"""A game in words."""

from dataclasses import replace

from gan.app.training.describe import describe
from tests.scenes.optimizers import Informed
from tests.support.hard_games import Every, Micro2, Teacher
from tests.support.sharing_games import Adapters, SharedBase


def test_players_with_sizes_and_recipes():
    text = describe(Teacher())
    assert "game Teacher" in text
    assert "generator: 94 parameters, Adam(lr=0.01, betas=(0.5, 0.9)), with a schedule, ema 0.8, clip 0.1" in text
    assert "    0: Linear, 40" in text
    assert "teacher: 54 parameters, frozen" in text


def test_what_a_player_has_and_another_one_stores():
    text = describe(SharedBase())
    assert "student: 232 parameters, 80 of them learn, Adam(" in text
    assert "fake: 272 parameters, 120 of them learn, 152 of them stored by student, Adam(" in text
    assert "teacher: 152 parameters, 152 of them stored by student, frozen" in text
    inside = "teacher: 276 parameters, 72 of them stored by student, 72 of them stored by fake, frozen"
    assert inside in describe(Adapters())


def test_a_player_that_is_not_saved():
    class Unsaved(Teacher):
        def configure_players(self):
            for player in super().configure_players():
                yield replace(player, saved=player.name != "teacher")

    assert "teacher: 54 parameters, frozen, not in checkpoints" in describe(Unsaved())


def test_phases_in_their_order_and_with_optimizers_of_their_own():
    said = "  inform: teaches generator, judge; every 2 steps; by Adam(lr=0.01, betas=(0.5, 0.999))"
    assert said in describe(Informed())
    lines = describe(Every()).splitlines()
    assert lines[-2:] == ["  discriminator: teaches discriminator", "  generator: teaches generator; every 3 steps"]
    assert "  generator: teaches generator; in 2 micro-batches" in describe(Micro2())
