"""Orders in which no two ranks wait for each other."""

import pytest
import torch

from strategies.amounts import bubble
from strategies.pipelining.program import Meta, Transfer
from strategies.pipelining.schedule import Action, forwards, merged, messages


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


# ---- messages, where a rank's are carried one after the other ----


def transfers_of(stages):
    """From each stage to the next, from the first to all others, and one through which no gradient comes back."""
    meta = Meta(torch.Size([2]), (1,), torch.float32)
    chain = [Transfer(stage, stage + 1, meta, learns=True) for stage in range(stages - 1)]
    skips = [Transfer(0, stage, meta, learns=True) for stage in range(2, stages)]
    return [*chain, *skips, Transfer(0, stages - 1, meta)]


def carry(orders, transfers, asked):
    """Let ranks take their steps. A message is carried when it was sent and is the next one on both of its ranks."""
    own = [
        [m for m in asked(rank) if rank in (m.source, m.target) and m.source != m.target] for rank in range(len(orders))
    ]
    left, came = [list(order) for order in orders], {m for m in messages(orders, transfers) if m.source == m.target}
    taken = set()

    def ends(message):
        transfer = transfers[message.forward][message.number]
        stages = (transfer.source, transfer.target) if message.forward else (transfer.target, transfer.source)
        return [(message.forward, Action(stage, message.chunk)) for stage in stages]

    needs = {step: {m for m in messages(orders, transfers) if ends(m)[1] == step} for order in orders for step in order}
    while any(left) or any(own):
        ready = [order for order in left if order and needs[order[0]] <= came]
        taken |= {order.pop(0) for order in ready}
        heads = [order[0] for order in own if order]
        moving = {m for m in heads if heads.count(m) == 2 and ends(m)[0] in taken}
        assert ready or moving, f"all wait: {heads}"
        own = [order[1:] if order and order[0] in moving else order for order in own]
        came |= moving


def passes():
    """Orders of steps: forwards, backwards, and both at once, of every schedule."""
    for ranks in (2, 3, 4):
        for chunks in (1, 2, 3, 8):
            for each in (1, 2, 3):
                plain = [forwards(rank, ranks, ranks * each, chunks) for rank in range(ranks)]
                yield ranks * each, [[(True, action) for action in order] for order in plain]
                yield ranks * each, [[(False, action) for action in order[::-1]] for order in plain]
            for before in (1, 3, 8):
                yield ranks, [merged(rank, ranks, chunks, before) for rank in range(ranks)]


@pytest.mark.parametrize(("stages", "orders"), list(passes()))
def test_no_ranks_wait_for_each_other_where_messages_keep_their_order(stages, orders):
    transfers = dict.fromkeys((True, False), transfers_of(stages))
    found = messages(orders, transfers)
    assert len(found) == len(set(found))
    carry(orders, transfers, lambda _: found)


def test_the_control_ranks_that_all_receive_first_wait_for_ever():
    orders = [[(True, action) for action in forwards(rank, 2, 4, 4)] for rank in range(2)]
    transfers = {True: transfers_of(4)}
    found = messages(orders, transfers)
    with pytest.raises(AssertionError, match="all wait"):
        carry(orders, transfers, lambda rank: sorted(found, key=lambda message: message.source == rank))
