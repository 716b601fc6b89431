"""Global batches are the same at any number of ranks, and a loader continues where it stopped."""

import pytest
from torch.utils.data import DistributedSampler

from datasets import GlobalBatches, ResumableLoader
from datasets.augment import Prepared
from gan.files.errors import UserError
from tests.support.numbers import Numbers


def part(ranks, rank, epoch=0, length=26, batch=8, seed=0, training=True):
    sampler = GlobalBatches(length, batch, ranks=ranks, rank=rank, seed=seed, training=training)
    sampler.set_epoch(epoch)
    pairs = list(sampler)
    assert len(pairs) == len(sampler) and {e for e, _ in pairs} <= {epoch}
    return [index for _, index in pairs]


def epoch_of(loader, epoch):
    loader.sampler.set_epoch(epoch)
    return [batch["index"].tolist() for batch in loader]


def test_every_epoch_and_every_seed_shuffles_anew_and_leaves_out_the_last_incomplete_batch():
    orders = [part(1, 0, epoch=epoch, seed=seed) for epoch in range(4) for seed in range(3)]
    assert {len({*order}) for order in orders} == {len(order) for order in orders} == {24}
    assert len({tuple(order) for order in orders} | {tuple(sorted(orders[0]))}) == 13
    assert part(1, 0, epoch=2) == part(1, 0, epoch=2)


def test_held_out_samples_come_in_order_and_once():
    assert part(1, 0, length=10, training=False) == list(range(10))
    for ranks in (2, 4):
        parts = [part(ranks, rank, length=10, training=False) for rank in range(ranks)]
        assert sorted(index for p in parts for index in p) == list(range(10 - 10 % ranks))
        assert len({len(p) for p in parts}) == 1, "ranks wait for each other"


def test_lightning_leaves_the_sampler_alone_and_an_epoch_can_start_inside():
    sampler = GlobalBatches(26, 8)
    assert isinstance(sampler, DistributedSampler)
    whole = [list(sampler), (sampler.set_epoch(1), list(sampler))[1]]
    sampler.resume(1, 2)
    sampler.set_epoch(1)
    assert len(sampler) == 24, "the length is that of an epoch wherever it starts"
    assert list(sampler) == whole[1][16:]
    again = list(sampler)
    assert len(again) == 24, "only the next pass starts inside"
    assert not {*again} & {*whole[1]}, "a second pass in the epoch has another order and other dice"
    sampler.resume(1, 0, passes=1)
    assert list(sampler) == again
    sampler.resume(0, 2, passes=2)
    sampler.set_epoch(1)
    assert list(sampler) == whole[1], "the passes of an epoch end with it"
    sampler.resume(0, 2)
    sampler.set_epoch(1)
    assert list(sampler) == whole[1], "another epoch starts at its beginning"


def loader_of(length, batch=4, seed=0, **how):
    return ResumableLoader(Prepared(Numbers(length)), GlobalBatches(length, batch, seed=seed), **how)


def test_nothing_is_prepared_before_the_epoch_is_known():
    loader = loader_of(40, workers=1)
    early = iter(loader)
    loader.sampler.set_epoch(5)
    assert next(early)["index"].tolist() == part(1, 0, epoch=5, length=40, batch=4)[:4]


@pytest.mark.parametrize(
    "length, batch, seed, message",
    [
        (40, 8, 0, "was trained with batch size 4, and has 8 now; resume with 4"),
        (
            44,
            4,
            0,
            "was trained with 40 samples, and has 44 now; to go on .* type --new-data, or make a loader",
        ),
        (40, 4, 1, "was trained with seed 0, and has 1 now"),
    ],
)
def test_another_order_is_not_resumed(length, batch, seed, message):
    state, other = loader_of(40).state_dict(), loader_of(length, batch, seed)
    with pytest.raises(UserError, match=message):
        other.load_state_dict(state)
    with pytest.raises(UserError, match="was trained with another kind of loader; resume with that one"):
        other.load_state_dict({"position": 3})


def named(*names, **how):
    data = Numbers(len(names))
    data.sample_names = [name.encode() for name in names]
    return ResumableLoader(Prepared(data), GlobalBatches(len(names), 2), **how)


def test_as_many_samples_of_other_names_are_not_resumed_unless_that_is_said():
    state = named("01", "02", "03", "04").state_dict()
    with pytest.raises(UserError, match=r"as now, but some have other names; to .* is there now, type --new-data$"):
        named("01", "02", "04", "zz").load_state_dict(state)
    for loader in (named("01", "02", "03", "04"), named("01", "02", "04", "zz", new_data=True)):
        loader.load_state_dict(state)
    del state["names"]  # a checkpoint of before
    named("01", "02", "04", "zz").load_state_dict(state)


@pytest.mark.parametrize("length", [36, 44])
def test_new_data_go_on_at_the_same_place_in_an_order_of_their_own(length):
    state = {**loader_of(40).state_dict(), "epoch": 2, "batch": 3}
    other, whole = loader_of(length, new_data=True), epoch_of(loader_of(length), 2)
    other.load_state_dict(state)
    assert epoch_of(other, 2) == whole[3:] and other.state_dict()["samples"] == length
