"""Ranks whose batches have other numbers of rows are named."""

from unittest import mock

import pytest
from torch.distributed import HashStore

from gan.files.errors import UserError
from strategies.processes.same_on_ranks import SameOnRanks


class Watched(HashStore):
    """A store that counts what is asked of it."""

    def __init__(self):
        super().__init__()
        self.asked = 0

    def check(self, keys):
        self.asked += 1
        return super().check(keys)


@pytest.fixture
def store():
    return Watched()


def three(store, *first):
    return [SameOnRanks(mock.Mock(size=3, rank=rank, gather=lambda _: list(first)), store) for rank in range(3)]


def step(ranks, number, *sizes):
    """All ranks begin a step, then each checks. Returns who is told what."""
    for rank, size in zip(ranks, sizes, strict=True):
        rank.begin(size)
    told = {}
    for who, rank in enumerate(ranks):
        try:
            rank.check("judge", number)
            rank.check("fool", number)
        except UserError as error:
            told[who] = str(error)
    return told


def test_a_change_on_all_ranks_is_no_error_and_steps_of_one_size_ask_nothing_of_the_store(store):
    ranks = three(store, 8, 8, 8)
    assert [step(ranks, number, 8, 8, 8) for number in range(5)] == [{}] * 5
    assert store.asked == 0
    sizes = (8, 4, 8, 8, 6, 5, 4, 3, 8)
    assert [step(ranks, number, size, size, size) for number, size in enumerate(sizes, 5)] == [{}] * len(sizes)
    assert store.num_keys() <= 2 * 3  # however often it changes


@pytest.mark.parametrize(
    ("sizes", "told", "message"),
    [
        ((8, 2, 8), {1}, "rank 1's batch has 2 rows and rank 0's 8"),
        ((2, 8, 8), {0}, "rank 1's batch has 8 rows and rank 0's 2"),
        ((4, 4, 8), {0, 1}, "rank 2's batch has 8 rows and rank 0's 4"),
        ((4, 5, 6), {0, 1, 2}, "rank 1's batch has 5 rows and rank 0's 4"),
    ],
)
def test_the_ranks_whose_size_has_changed_find_a_difference(sizes, told, message, store):
    ranks = three(store, 8, 8, 8)
    for number, size in enumerate((8, 4, 8)):  # an equal change before, of which the store still has the traces
        assert step(ranks, number, size, size, size) == {}
    found = step(ranks, 3, *sizes)
    assert found.keys() == told
    for text in found.values():
        assert text.startswith(f"phase 'judge' of step 3: {message}, so the mean over ranks is not")
