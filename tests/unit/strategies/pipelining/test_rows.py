"""The noise of a chunk is that of its samples on their own ranks."""

import pytest
import torch

from gan import noise
from gan.files.errors import UserError
from gan.noise import Place
from strategies.pipelining.pipe import ChunkPlace

KEY = (1, 2, "phase")


def place(rank: int) -> Place:
    """Of three rows of each of two ranks, in the first of two micro-batches."""
    return Place(KEY, rank * 6, 3, 12, stride=2)


def chunk(start: int, stop: int) -> ChunkPlace:
    """These rows, of the six of both ranks."""
    return ChunkPlace(KEY, 0, 3, 12, 2, firsts=(0, 6), per_rank=3, start=start, stop=stop)


def drawn(at: Place, draw) -> torch.Tensor:
    with noise.at(at):
        draw()
        return draw()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("kind", [noise.randn, noise.rand, lambda shape: noise.randint(0, 100, shape)])
def test_a_chunk_draws_what_its_ranks_draw(kind, times):
    wholes = [drawn(place(rank), lambda: kind((3 * times, 2))).view(times, 3, 2) for rank in (0, 1)]
    found = drawn(chunk(1, 4), lambda: kind((3 * times, 2)))
    assert torch.equal(found.view(times, 3, 2), torch.cat([wholes[0][:, 1:3], wholes[1][:, 0:1]], 1))


def test_the_control_at_another_place_the_draws_differ():
    one, other = (drawn(chunk(start, start + 3), lambda: noise.randn((3, 2))) for start in (0, 3))
    assert not torch.equal(one, other)


def test_common_draws_are_those_of_all():
    found = drawn(chunk(1, 3), lambda: noise.randn((2,), common=True))
    assert torch.equal(found, drawn(place(1), lambda: noise.randn((2,), common=True)))


def test_draws_are_counted_once():
    at = chunk(2, 4)
    drawn(at, lambda: noise.randn((2, 2)))
    assert at.calls == 2


def test_seeds_follow_the_sample_too():
    assert chunk(4, 6).seeds(2) == place(1).seeds(3)[1:]


def test_rows_that_belong_to_no_sample_are_refused():
    with pytest.raises(UserError, match="noise of 3 rows inside a network of policy 'pipeline'"):
        drawn(chunk(0, 2), lambda: noise.randn((3, 2)))
