"""Sums, means and rows over ranks, and what may take the place of torch.distributed."""

import pytest
import torch

from gan import ranks
from gan.files.errors import UserError
from tests.support.rehearsal.threads import device_threads


def doubled(values: torch.Tensor) -> torch.Tensor:
    """As if a second rank had the same values."""
    return 2 * values


def test_on_one_device_everything_is_what_was_given():
    values = torch.arange(4.0, requires_grad=True)
    assert ranks.sum(values) is ranks.mean(values) is ranks.gather(values) is values
    assert ranks.gather(values, own=True) == (values, slice(0, 4))
    assert ranks.sum(torch.tensor([True, False])).tolist() == [1, 0]  # a count, as on several
    sums = []
    with ranks.recording(sums):
        assert not ranks.more_than_one()
    with ranks.replaying(sums):
        assert not ranks.more_than_one()


def test_a_sum_and_its_gradients_of_every_order_are_sums_in_the_world_of_its_forward():
    """Wherever backward runs: for a GPU in a thread of autograd's own. And nothing of it is recorded."""
    x, sums = torch.tensor([3.0], requires_grad=True), []
    with ranks.summed_by(doubled, 0, 2):
        with ranks.recording(sums):
            kept, total = ranks.here(), ranks.sum(x) ** 2
        assert kept.add is doubled
    with device_threads():
        (slope,) = torch.autograd.grad(total, x, create_graph=True)
        (bend,) = torch.autograd.grad(slope, x)
    assert (total.item(), slope.item(), bend.item(), len(sums)) == (36, 24, 8, 1)
    assert not ranks.more_than_one()
    with ranks.summed_by(doubled, 0, 2):
        with ranks.alone():
            total = ranks.mean(x) ** 2
        assert torch.autograd.grad(total, x)[0].item() == 6
        with ranks.at(None):
            assert not ranks.more_than_one() and ranks.here() is None


def test_recorded_sums_are_replayed_in_order_and_no_one_is_asked_again():
    sums, asked = [], []

    def add(values):
        asked.append(values)
        return doubled(values)

    with ranks.summed_by(add, 0, 2):
        with ranks.recording(sums):
            first = [ranks.sum(torch.tensor([value])) for value in (1.0, 5.0)]
        with ranks.replaying(sums):
            again = [ranks.sum(torch.tensor([value])) for value in (0.0, 0.0)]
    assert first == again == [2, 10]
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ranks.mean(torch.arange(3)), r"gan.ranks.mean of torch.int64 values .*; type values.float\(\) first"),
        (lambda: ranks.gather(torch.tensor(1.0)), r"concatenates rows, and a scalar has none; type gather\(value"),
    ],
)
def test_what_has_no_answer_is_refused_on_any_number_of_ranks(call, message):
    with pytest.raises(UserError, match=message):
        call()


# ---- on ranks ----

COUNTS = (3, 1)


def numbers(kind):
    """The rows of two ranks together, no two of them equal."""
    return (torch.arange(8).reshape(4, 2) % 5).to(kind)


def on_rank(kind):
    mine = numbers(kind).split(COUNTS)[torch.distributed.get_rank()]
    with torch.no_grad():
        every, own = ranks.gather(mine, own=True)
        assert torch.equal(every[own], mine)
        return every, ranks.gather(mine.mT.contiguous().mT[:, :0]), ranks.sum(mine.sum(0))


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool])
def test_rows_of_unequal_numbers_are_gathered_in_order_and_type(kind, ranks):
    for gathered, empty, total in ranks(2).run(on_rank, kind):
        assert gathered.dtype == kind
        assert torch.equal(gathered, numbers(kind))
        assert empty.shape == (4, 0)
        assert torch.equal(total, numbers(kind).sum(0))


def gradients_on_rank():
    """Of a loss of all rows, to the second order, and how far compiled code is from it."""
    torch.manual_seed(torch.distributed.get_rank())
    rows = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def loss(rows):
        every = ranks.gather(rows.tanh())
        return ((every @ every.T).softmax(1).diagonal().log().sum() - ranks.mean(rows.square()).exp().sum()) / 4

    (slope,) = torch.autograd.grad(loss(rows), rows, create_graph=True)
    (bend,) = torch.autograd.grad(slope.square().sum(), rows)
    (compiled,) = torch.autograd.grad(torch.compile(loss, backend="eager")(rows), rows)
    return rows.detach(), slope.detach(), bend, (compiled - slope).abs().max().item()


def test_gradients_are_those_of_one_device(ranks):
    results = ranks(2).run(gradients_on_rank)
    rows = torch.cat([each[0] for each in results]).requires_grad_()
    every = rows.tanh()
    mean = rows.square().view(2, 2, 3).mean(0)
    whole = ((every @ every.T).softmax(1).diagonal().log().sum() - mean.exp().sum()) / 4
    (slope,) = torch.autograd.grad(whole, rows, create_graph=True)
    # Two ranks differentiate the same loss, so rows get twice one device's gradient; the strategy halves it.
    found = torch.cat([each[1] for each in results]) / 2
    assert (found - slope).abs().max() < 1e-14
    (bend,) = torch.autograd.grad((2 * slope).square().sum(), rows)
    assert (torch.cat([each[2] for each in results]) - bend).abs().max() < 1e-13
    assert all(each[3] == 0 for each in results)
