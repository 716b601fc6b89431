"""The games of several words, which the matrix trains under every policy: each word counts, and they are resumed."""

from dataclasses import fields, replace

import pytest

from tests.support.duel import fit, played
from tests.support.parity import BROKEN, EXACT, distance, often
from tests.support.saved import read_checkpoint, write_checkpoint
from tests.support.word_games import EPOCH, Followed, Turns

SETTINGS = {Turns: {}, Followed: {"limit_train_batches": EPOCH}}


def without(game, word):
    """The game as if nobody had written this word."""

    def plain(each):
        return replace(each, **{field.name: field.default for field in fields(each) if field.name == word})

    class Without(game):
        def configure_players(self):
            yield from map(plain, super().configure_players())

        def configure_phases(self):
            yield from map(plain, super().configure_phases())

    return Without


@pytest.mark.parametrize(
    ("game", "word"),
    [
        *((Turns, word) for word in ("start", "until", "every", "when", "freeze", "after", "clip")),
        *((Followed, word) for word in ("ema_per", "schedule_per")),
    ],
)
def test_the_control_without_a_word_is_another_training(game, word):
    expected = fit(game, "single", 1, **SETTINGS[game])
    assert distance(fit(without(game, word), "single", 1, **SETTINGS[game]), expected) > BROKEN


# ---- saved and resumed: turns so far, what is frozen, and weights that have not learned yet ----

HALF = 4  # `when` says no in the next step; the generator's last layer has no optimizer state until then


@pytest.mark.parametrize(("policy", "world"), often([("single", 1), ("ddp", 2), ("zero3", 2)], ["zero3"]))
def test_turns_are_resumed_bit_for_bit(policy, world, ranks, tmp_path):
    unbroken = played(ranks, Turns, policy, world)
    played(ranks, Turns, policy, world, steps=HALF, save=str(tmp_path / "half.ckpt"))
    assert distance(played(ranks, Turns, policy, world, resume=str(tmp_path / "half.ckpt")), unbroken) == 0


@pytest.mark.slow
def test_turns_travel_between_policies_and_the_control_that_forgets_them_arrives_elsewhere(ranks, tmp_path):
    expected = fit(Turns, "single", 1)
    path = None
    for step, (policy, world) in enumerate([("zero3", 2), ("zero1", 4), ("dp", 2), ("zero3", 4)], HALF - 1):
        before, path = path, str(tmp_path / f"{step}.ckpt")
        played(ranks, Turns, policy, world, steps=step, save=path, resume=before)
    assert distance(fit(Turns, "single", 1, resume=path), expected) < EXACT
    tree = read_checkpoint(path)
    tree["state_dict"]["turns"].zero_()
    write_checkpoint(tmp_path / "forgotten.ckpt", tree)
    assert distance(fit(Turns, "single", 1, resume=str(tmp_path / "forgotten.ckpt")), expected) > BROKEN
