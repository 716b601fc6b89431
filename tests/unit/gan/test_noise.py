"""Noise follows the sample: rank, micro-batch and copy do not matter, step, phase and call do."""

import torch

from gan import noise
from gan.noise import Place, seed_for


def draw(first, rows, shape=(3,), key=(1, 5, "phase"), calls=1, copies=1):
    with noise.at(Place(key, first, rows, 8)):
        drawn = [noise.randn((rows * copies, *shape)) for _ in range(calls)]
    return drawn[-1]


def test_a_rank_draws_its_rows_of_the_global_batch():
    whole = draw(0, 8)
    assert torch.equal(torch.cat([draw(0, 4), draw(4, 4)]), whole)
    assert torch.equal(torch.cat([draw(first, 1) for first in range(8)]), whole)
    assert whole.std() > 0.5
    assert len(whole.unique()) == whole.numel()


def test_micro_batches_of_every_other_row_draw_their_rows_of_the_global_batch():
    whole = draw(0, 8)
    for rank in (0, 4):
        for part in (0, 1):
            with noise.at(Place((1, 5, "phase"), rank + part, 2, 8, stride=2)):
                assert torch.equal(noise.randn((2, 3)), whole[rank + part : rank + 4 : 2])


def test_a_draw_belongs_to_the_loader_with_its_number_of_rows():
    def drawn(first, rows, others):
        with noise.at(Place((1,), first, rows, 8, others=others)):
            return [noise.randn((n, 3)) for n in (rows, *others, 2 * rows)]

    whole, *halves = drawn(0, 8, {4: 0}), drawn(0, 4, {2: 0}), drawn(4, 4, {2: 2})
    for number in (0, 1):
        assert torch.equal(torch.cat([half[number] for half in halves]), whole[number])
    assert torch.equal(torch.cat([half[2][:4] for half in halves]), whole[2][:8])


def test_fakes_and_reals_in_one_forward_draw_alike_at_any_number_of_ranks():
    fakes, reals = draw(0, 8, copies=2).split(8)
    mine = [draw(first, 4, copies=2).split(4) for first in (0, 4)]
    assert torch.equal(torch.cat([mine[0][0], mine[1][0]]), fakes)
    assert torch.equal(torch.cat([mine[0][1], mine[1][1]]), reals)
    assert not torch.equal(fakes, reals)


def test_step_phase_seed_and_call_all_matter():
    drawn = [
        draw(0, 2),
        draw(0, 2, calls=2),
        *(draw(0, 2, key=key) for key in ((2, 5, "phase"), (1, 6, "phase"), (1, 5, "x"))),
    ]
    for one in range(5):
        for other in range(one):
            assert not torch.equal(drawn[one], drawn[other])


def test_kind_and_device_are_those_of_like():
    with noise.at(Place((0,), 0, 2, 2)):
        assert noise.rand((2, 4), like=torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
        values = noise.rand((2, 4000))
    assert 0 <= values.min() < 0.01 < 0.99 < values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02


def test_it_draws_nothing_from_the_global_state_and_outside_a_phase_it_is_torchs():
    torch.manual_seed(3)
    draw(0, 8)
    inside = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), inside)
    torch.manual_seed(3)
    outside = noise.randn((2, 3))
    torch.manual_seed(3)
    assert torch.equal(torch.randn(2, 3), outside)


def test_places_nest_and_end():
    outer, inner = Place((0,), 0, 1, 1), Place((1,), 0, 1, 1)
    with noise.at(outer):
        with noise.at(inner):
            assert noise.here() is inner
        assert noise.here() is outer
    assert noise.here() is None


def test_seeds_are_stable_and_unrelated():
    assert seed_for(1, 2, "x") == 7284216157882031730  # on every machine, in every process
    assert len({seed_for(a, b) for a in range(30) for b in range(30)}) == 900
    assert 0 <= seed_for("anything") < 2**63
