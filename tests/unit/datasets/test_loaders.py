"""Loaders for data sets and streams of one's own: ranks together get what one device gets."""

import random
import signal
from itertools import chain, count
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import IterableDataset, Sampler, get_worker_info

from datasets import GlobalLoader, GlobalStream, loaders
from gan.files.errors import UserError
from tests.support.numbers import Numbers


class Own(Numbers):
    """As people write them: a tuple, with augmentation from every global generator."""

    def __init__(self, length=22):
        super().__init__(length)

    def __getitem__(self, index):
        return torch.tensor(index), torch.rand(2), np.random.rand(), random.random(), f"caption {index}"


class Stream(IterableDataset):
    """As torch's page has it: the workers of a plain DataLoader share its samples out."""

    def __iter__(self):
        order, worker = torch.randperm(22).tolist(), get_worker_info()
        if worker is not None:
            order = order[worker.id :: worker.num_workers]
        return map(Own().__getitem__, order)


def on_rank(rank, ranks, kind, *args, **kwargs):
    with mock.patch.object(loaders, "number_and_size", lambda: (rank, ranks)):
        return kind(*args, **kwargs)


def joined(parts):
    return [[[*chain(*values)] for values in zip(*batch, strict=True)] for batch in zip(*parts, strict=True)]


def lists(batches):
    return [[value.tolist() if torch.is_tensor(value) else [*value] for value in batch] for batch in batches]


def test_every_sample_has_its_own_augmentation_in_every_epoch():
    """That ranks together get the batches of one device is in tests/ranks/test_loaders.py."""
    loader = GlobalLoader(Own(), 8)
    assert len({x for _ in range(2) for batch in loader for x, _ in batch[1].tolist()}) == 32


def test_a_data_set_may_keep_its_order_and_its_last_batch():
    assert [batch[0].tolist() for batch in GlobalLoader(Own(10), 4, shuffle=False)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    kept = [batch[0].tolist() for batch in GlobalLoader(Own(10), 4, training=False)]
    assert kept == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_the_global_generators_are_left_alone():
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    list(GlobalLoader(Own(), 8))
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (2, 2)])
def test_ranks_together_get_the_stream_of_one_device(ranks, workers):

    def batches(rank, ranks, workers=0):
        loader = on_rank(rank, ranks, GlobalStream, Stream(), 4, workers=workers, seed=2)
        return lists(loader), lists(loader)

    first, second = batches(0, 1)
    numbers = [number for batch in first for number in batch[0]]
    assert len(set(numbers)) == 20 and max(numbers) < 22, "each sample once, but for the last two"
    parts = [batches(rank, ranks, workers) for rank in range(ranks)]
    assert [joined(part) for part in zip(*parts, strict=True)] == [first, second]
    assert first[0][0] != second[0][0], "every pass has its own order"


OPENED = []


def open_files(worker):
    OPENED.append(worker)


class Opened(Numbers):
    """It has a file that each worker opens for itself, in a process that leaves Ctrl-C to the trainer."""

    def __getitem__(self, index):
        return OPENED[0], signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.parametrize("kind", [GlobalLoader, GlobalStream])
def test_a_worker_may_begin_with_something_of_ones_own(kind):
    loader = kind(Opened(8), 4, workers=1, prefetch_factor=3, worker_init_fn=open_files)
    assert [part.tolist() for part in next(iter(loader))] == [[0] * 4, [True] * 4]
    assert loader.prefetch_factor == 3
    assert kind is GlobalStream or loader.signs()


def test_pictures_of_pillows_become_tensors_also_in_a_dict_and_a_collation_of_ones_own_gets_them():
    picture = Image.new("L", (2, 2), 255)
    named = [{"photo": picture, "age": age} for age in range(2)]
    (batch,) = GlobalLoader(named, 2, shuffle=False)
    assert torch.equal(batch["photo"], torch.ones(2, 1, 2, 2)) and batch["age"].tolist() == [0, 1]
    (pair,) = GlobalLoader([(picture, 0), (picture, 1)], 2, shuffle=False)
    assert torch.equal(pair["image"], torch.ones(2, 1, 2, 2)) and pair["class"].tolist() == [0, 1]
    for samples in (named, [(picture, 0), (picture, 1)]):
        assert list(GlobalLoader(samples, 2, shuffle=False, collate_fn=list)) == [samples]


@pytest.mark.parametrize(
    ("stream", "size", "words"),
    [
        (map(int, range(7)), 3, "map gave 0 samples, .* can be read only once: give an object whose"),
        (range(2), 3, "pass 1 over the range gave 2 samples, and batch_size= is 3; make that smaller"),
    ],
)
def test_a_pass_over_a_stream_that_fills_no_batch_is_named(stream, size, words):
    """Lightning would read a stream without a batch for ever."""
    loader = GlobalStream(stream, size)
    with pytest.raises(UserError, match=words):
        list(loader), list(loader)


@pytest.mark.parametrize("kind", [GlobalLoader, GlobalStream])
def test_batches_that_ranks_cannot_share_are_refused(kind):
    with pytest.raises(UserError, match="batch 6 is not divisible by 4 ranks; try batch_size=4 or batch_size=8"):
        on_rank(0, 4, kind, Own(), 6)
    with pytest.raises(UserError, match="22 samples do not fill a batch of 32"):
        GlobalLoader(Own(), 32)
    for stream in (Stream(), iter(range(8))):
        with pytest.raises(UserError, match="has no length; type GlobalStream in place of GlobalLoader"):
            GlobalLoader(stream, 4)


class Endless(Sampler):
    """As NVIDIA's InfiniteSampler."""

    def __iter__(self):
        for number in count():
            assert number < 100, "it would go on for ever"
            yield number * 5 % 22


class Ending(Endless):
    length = 64

    def __len__(self):
        return self.length


def test_of_a_sampler_without_an_end_as_many_samples_are_taken_as_it_says():
    parts = [on_rank(rank, 2, GlobalLoader, Own(), 8, sampler=Ending()) for rank in (0, 1)]
    found = [number for batch in joined(map(lists, parts)) for number in batch[0]]
    assert found == [number * 5 % 22 for number in range(64)]
    for sampler in (Endless(), type("Far", (Ending,), {"length": 10**9})()):
        with pytest.raises(UserError, match="has no end; let its __len__ return how many samples the whole training"):
            GlobalLoader(Own(), 8, sampler=sampler)
