"""Pipelines: stages, chunks, and the order of messages."""

from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from gan import Player, noise
from gan.files.errors import UserError
from gan.noise import Place
from strategies.pipelining.cutting import cut, most_stages, networks_of, share_out, units_of
from strategies.pipelining.pipe import Meta, Transfer
from strategies.pipelining.request import ChunkPlace
from strategies.pipelining.schedule import Action, forwards, merged, messages
from strategies.pipelining.writes import Buffers
from strategies.policies.amounts import bubble
from tests.support.staged_games import Tower

# ---- cutting ----


@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8), data=st.data())
def test_the_largest_stage_is_as_small_as_can_be(sizes, data):
    """In the order of the layers, against all ways to cut."""
    stages = data.draw(st.integers(1, len(sizes)))
    found = share_out(sizes, stages)
    assert found == sorted(found) and set(found) == set(range(stages))
    largest = max(sum(size for size, its in zip(sizes, found, strict=True) if its == s) for s in range(stages))
    every = ([0, *cut, len(sizes)] for cut in combinations(range(1, len(sizes)), stages - 1))
    assert largest == min(max(sum(sizes[a:b]) for a, b in pairwise(cut)) for cut in every)


def units(module, **kwargs):
    return units_of(Player("net", module, **kwargs), "", module)


@pytest.mark.parametrize(
    ("network", "blocks", "names"),
    [
        (Tower(), None, "start blocks.0 blocks.1 blocks.2 blocks.3 end"),
        (nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))), None, "0 2.0 2.1"),
        (Tower(), ["blocks.2", "blocks.0"], "start blocks.2 blocks.3 end blocks.0 blocks.1"),
        (nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(2, track_running_stats=True), nn.Tanh()), None, "0 1"),
    ],
)
def test_blocks_and_layers_outside_of_them_are_units_in_the_order_of_names(network, blocks, names):
    assert [unit.name for unit in units(network, blocks=blocks)] == names.split()


def test_a_stage_begins_with_a_named_block_or_is_cut_by_the_sizes_of_units():
    found = units(Tower(), blocks=["blocks.1", "blocks.3"])
    assert [unit.name for unit in found if unit.cuttable] == ["blocks.1", "blocks.3"] and most_stages(found) == 3
    by_name = {unit.name: unit.stage for unit in cut(found, 3)}
    assert by_name == {"start": 0, "blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "blocks.3": 2, "end": 2}
    found = units(nn.Sequential(*(nn.Linear(10, 10 * size, bias=False) for size in (1, 9, 1, 1, 1))))
    assert [unit.stage for unit in cut(found, 3)] == [0, 1, 2, 2, 2]


def test_tied_weights_and_networks_that_cannot_be_called_are_refused_by_name():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.Linear(2, 2)

    one, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.weight = one.weight
    with pytest.raises(UserError, match=r"weight '0.weight' is in '0' and in '1'"):
        units(nn.Sequential(one, other))
    with pytest.raises(UserError, match=r"a Heads has no forward; type --strategy .*zero3"):
        networks_of(Player("net", Heads()))


# ---- rows ----


KEY = (1, 2, "phase")


def place(rank: int) -> Place:
    """Of three rows of each of two ranks, in the first of two micro-batches."""
    return Place(KEY, rank * 6, 3, 12, stride=2)


def chunk(start: int, stop: int) -> ChunkPlace:
    """These rows, of the six of both ranks."""
    return ChunkPlace(KEY, 0, 3, 12, 2, firsts=(0, 6), per_rank=3, start=start, stop=stop)


def drawn(at: Place, **how) -> torch.Tensor:
    with noise.at(at):
        noise.randn((2,), **how)
        return noise.randn((2,), **how)


def test_a_chunk_has_its_ranks_rows_common_draws_and_counts_and_no_rows_of_no_sample():
    at = chunk(1, 3)
    assert torch.equal(drawn(at, common=True), drawn(place(1), common=True)) and at.calls == 2
    assert chunk(1, 3).seeds(2) == place(0).seeds(3)[1:] and chunk(4, 6).seeds(2) == place(1).seeds(3)[1:]
    with pytest.raises(UserError, match="noise of 3 rows inside a network of policy 'pipeline'"), noise.at(chunk(0, 2)):
        noise.randn((3, 2))


# ---- schedule ----


def play(orders, needs):
    """Run all ranks' actions, each as soon as it can. How many rounds that takes."""
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


@given(ranks=st.integers(1, 5), each=st.integers(1, 3), chunks=st.integers(1, 9))
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


@given(ranks=st.integers(2, 5), chunks=st.integers(1, 8), before=st.integers(1, 8))
@example(ranks=4, chunks=8, before=8)
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


@st.composite
def passes(draw):
    """Orders of steps: forwards, backwards, or both at once, of every schedule."""
    ranks, each, chunks = draw(st.integers(2, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 8))
    forward, backward = draw(st.sampled_from([(True, False), (False, True), (True, True)]))
    if forward and backward:
        before = draw(st.integers(1, 8))
        return ranks, [merged(rank, ranks, chunks, before) for rank in range(ranks)]
    plain = [forwards(rank, ranks, ranks * each, chunks)[:: 1 if forward else -1] for rank in range(ranks)]
    return ranks * each, [[(forward, action) for action in order] for order in plain]


@given(found=passes())
def test_no_ranks_wait_for_each_other_where_messages_keep_their_order(found):
    stages, orders = found
    transfers = dict.fromkeys((True, False), transfers_of(stages))
    found = messages(orders, transfers)
    assert len(found) == len(set(found))
    carry(orders, transfers, lambda _: found)


def test_a_buffer_that_is_written_with_the_same_value_counts_as_written():
    """A spectral norm of one row finds its singular value again, until the weight has learned."""
    network = nn.BatchNorm1d(2)
    pipe: Any = SimpleNamespace(network=network, units=[], mine=frozenset)
    buffers = Buffers(pipe, dict(network.named_buffers()))
    with buffers.chunk():
        network.running_mean.copy_(torch.zeros(2))
        network.running_var = torch.ones(2)
    assert buffers.written.keys() == {"running_mean"}
