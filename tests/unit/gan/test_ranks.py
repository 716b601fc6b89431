"""Sums over ranks, and what may take the place of torch.distributed."""

import torch

from gan import ranks


def doubled(values: torch.Tensor) -> torch.Tensor:
    """As if a second rank had the same values."""
    return 2 * values


def test_one_rank_is_alone_and_records_nothing():
    sums = []
    with ranks.recording(sums):
        assert not ranks.more_than_one()
    with ranks.replaying(sums):
        assert not ranks.more_than_one()


def test_a_sum_and_its_gradients_of_every_order_are_sums():
    with ranks.summed_by(doubled):
        assert ranks.more_than_one()
        x = torch.tensor([3.0], requires_grad=True)
        total = ranks.sum(x) ** 2
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        (bend,) = torch.autograd.grad(slope, x)
    assert (total.item(), slope.item(), bend.item()) == (36, 24, 8)
    assert not ranks.more_than_one()


def test_recorded_sums_are_replayed_in_order_and_no_one_is_asked_again():
    sums, asked = [], []

    def add(values):
        asked.append(values)
        return doubled(values)

    with ranks.summed_by(add):
        with ranks.recording(sums):
            first = [ranks.sum(torch.tensor([value])) for value in (1.0, 5.0)]
        with ranks.replaying(sums):
            again = [ranks.sum(torch.tensor([value])) for value in (0.0, 0.0)]
    assert first == again == [2, 10]
    assert len(asked) == 2
