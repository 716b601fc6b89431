"""A trace in which other ranks serve a player: what they hold is counted apart, and the game stays as it was."""

import torch

from strategies.cost.tracing import traces
from tests.support.placed_games import Distil

ROWS = 4


def found(**served):
    with torch.device("meta"):
        game = Distil()
        game.assemble()
        batch = {"x": torch.empty(ROWS, 6, dtype=torch.float32)}
    before = [sorted(vars(module)) for module in game.modules()]
    phases = {trace.phase: trace for trace in traces(game, batch, served=served)}
    assert [sorted(vars(module)) for module in game.modules()] == before
    return phases


def highest(trace):
    return max(event.highest for event in trace.events)


def highest_there(trace, where):
    return max(event.there[where].highest for event in trace.events if where in event.there)


def test_what_a_call_makes_is_on_the_ranks_that_serve():
    whole, apart = found(), found(teacher="2-3")
    for name in ("judge", "generator"):
        assert highest(apart[name]) < highest(whole[name])
        assert highest_there(apart[name], "2-3") > 0
    assert all(not event.there for trace in whole.values() for event in trace.events)
    assert apart["judge"].resting == {"2-3": 0}  # no backward of this phase goes through it
    assert apart["generator"].resting["2-3"] > 4 * ROWS * 8


def test_the_bytes_of_calls_and_their_gradients_are_counted():
    rows = found(teacher="2-3")["judge"].asked["teacher"]
    assert rows.sent == 4 * ROWS * 6  # the pictures; and back: a score, and three levels of eight numbers
    assert rows.returned == 4 * ROWS * (1 + 3 * 8)
    there = found(teacher="2-3")["generator"].asked["teacher"]
    assert there.sent > there.returned > rows.returned  # the gradients of many outputs go there


def test_sets_of_ranks_are_counted_apart():
    one, two = found(teacher="2", eye="2")["generator"], found(teacher="2", eye="3")["generator"]
    assert one.resting["2"] == two.resting["2"] + two.resting["3"]
    assert 0 < highest_there(two, "3") < highest_there(two, "2")
    assert set(two.asked) == {"teacher", "eye"}
