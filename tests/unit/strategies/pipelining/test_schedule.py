"""Orders in which no two ranks wait for each other."""

import pytest

from strategies.cost.amounts import bubble
from strategies.pipelining.program import Action, forwards, merged


def play(orders, needs):
    """Run all ranks' actions, each as soon as it can. Returns how many rounds that takes; raises if it never ends."""
    left, done, rounds = [list(order) for order in orders], set(), 0
    while any(left):
        ready = [order[0] for order in left if order and needs(order[0]) <= done]
        assert ready, f"all wait: {[order[:1] for order in left]}"
        for order in left:
            if order and order[0] in ready:
                order.pop(0)
        done |= set(ready)
        rounds += 1
    return rounds


def earlier(action):
    return {Action(action.stage - 1, action.chunk)} if action.stage else set()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("each", [1, 2, 3])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 8])
def test_every_chunk_passes_every_stage_once_and_in_order(ranks, each, chunks):
    stages = ranks * each
    orders = [forwards(rank, ranks, stages, chunks) for rank in range(ranks)]
    assert sorted(each for order in orders for each in order) == [
        Action(stage, chunk) for stage in range(stages) for chunk in range(chunks)
    ]
    assert all(action.stage % ranks == rank for rank, order in enumerate(orders) for action in order)
    rounds = play(orders, earlier)
    if chunks % ranks == 0:
        busy = chunks * each
        assert 1 - busy / rounds == pytest.approx(bubble(ranks, chunks, each))


def test_the_reverse_is_an_order_of_the_backwards():
    orders = [forwards(rank, 3, 6, 6)[::-1] for rank in range(3)]
    play(orders, lambda action: {Action(action.stage + 1, action.chunk)} if action.stage < 5 else set())


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 5, 8])
@pytest.mark.parametrize("before", [1, 2, 8])
def test_a_backward_beside_a_forward_fills_the_time_of_waiting(ranks, chunks, before):
    orders = [merged(rank, ranks, chunks, before) for rank in range(ranks)]

    def needs(step):
        forward, action = step
        stage = action.stage - 1 if forward else action.stage + 1
        return {(forward, Action(stage, action.chunk))} if 0 <= stage < ranks else set()

    rounds = play(orders, needs)
    one_by_one = (chunks + ranks - 1) + (before + ranks - 1)
    assert rounds <= one_by_one
    if chunks == before == 8:
        assert rounds < one_by_one - (ranks - 1) / 2


def test_the_control_in_another_order_two_ranks_wait_for_each_other():
    orders = [forwards(0, 2, 4, 4), forwards(1, 2, 4, 4)[::-1]]
    with pytest.raises(AssertionError, match="all wait"):
        play(orders, earlier)
