"""Bytes on links, and the bubble of a pipeline."""

import pytest

from strategies.amounts import Collective, Group, Moved, bubble, moved, readable


@pytest.mark.parametrize(
    ("group", "local", "expected"),
    [
        (Group(4), 4, Moved(75, 0)),  # one node
        (Group(4), 1, Moved(0, 75)),  # four nodes
        (Group(8), 4, Moved(87.5, 87.5)),  # a ring through two nodes leaves each once
        (Group(4, 1), 8, Moved(75, 0)),  # neighbours
        (Group(2, 4), 4, Moved(0, 4 * 50)),  # four copies side by side, each on two nodes
        (Group(2, 2), 4, Moved(50, 0)),  # copies inside of a node
        (Group(1), 4, Moved(0, 0)),
    ],
)
def test_a_ring_sends_its_part_on_each_link(group, local, expected):
    assert moved([Collective("all-gather", 100, group)], local) == expected
    assert moved([Collective("reduce-scatter", 100, group)], local) == expected
    assert moved([Collective("all-reduce", 100, group)], local) == expected * 2


def test_hybrid_moves_as_much_between_nodes_as_ddp():
    """A gather and a reduction inside of each node, and an all-reduce of the shards between them."""
    inside, copies = Group(8), Group(4, 8)
    hybrid = [Collective("reduce-scatter", 100, inside), Collective("all-reduce", 100 / 8, copies)]
    assert moved(hybrid, 8).between == pytest.approx(2 * 100 * 3 / 4)


@pytest.mark.parametrize(
    ("stages", "chunks", "interleaved", "expected"),
    [(1, 8, 1, 0), (4, 1, 1, 3 / 4), (4, 4, 1, 3 / 7), (4, 12, 1, 3 / 15), (4, 4, 3, 1 / 5)],
)
def test_the_bubble_of_a_pipeline(stages, chunks, interleaved, expected):
    assert bubble(stages, chunks, interleaved) == pytest.approx(expected)


def test_the_bubble_is_the_idle_part_of_a_schedule():
    """GPipe's forward, step by step: stage s computes chunk c in slot s + c."""
    stages, chunks = 4, 6
    busy = {(stage, stage + chunk) for stage in range(stages) for chunk in range(chunks)}
    slots = 1 + max(slot for _, slot in busy)
    assert bubble(stages, chunks) == pytest.approx(1 - len(busy) / (slots * stages))


@pytest.mark.parametrize(
    ("amount", "said"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (25 * 2**20, "26.2 MB"), (1.234e9, "1.23 GB"), (1.037e12, "1,037 GB")],
)
def test_amounts_are_readable(amount, said):
    assert readable(amount) == said
