"""What a checkpoint has of a player beside its weights."""

from types import SimpleNamespace

from strategies.checkpoint.player_state import load_rest, rest_of_state


def player(updates, skipped):
    return SimpleNamespace(ema=None, average=SimpleNamespace(updates=updates), loss_scale=None, skipped=skipped)


def test_counts_of_updates_come_back():
    resumed = player(0, 0)
    load_rest(resumed, rest_of_state(player(5, 3)))
    assert (resumed.average.updates, resumed.skipped) == (5, 3)
