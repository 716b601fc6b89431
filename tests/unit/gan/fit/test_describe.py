"""A game in words."""

from gan.fit.describe import describe
from tests.support.hard_games import Every, Micro2, Teacher


def test_players_with_sizes_and_recipes():
    text = describe(Teacher())
    assert "game Teacher" in text
    assert "generator: 94 parameters, Adam(lr=0.01, betas=(0.5, 0.9)), with a schedule, ema 0.8, clip 0.1" in text
    assert "    0: Linear, 40" in text
    assert "teacher: 54 parameters, frozen" in text


def test_phases_in_their_order():
    lines = describe(Every()).splitlines()
    assert lines[-2:] == ["  discriminator: teaches discriminator", "  generator: teaches generator; every 3 steps"]
    assert "  generator: teaches generator; in 2 micro-batches" in describe(Micro2())
