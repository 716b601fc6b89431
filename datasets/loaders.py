"""Loaders for data sets and streams of one's own, whose batches are the same at any number of ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from datasets.augment import Samples, as_item, to_tensors
from datasets.batches import GlobalBatches, ResumableLoader, check_divides, check_held_out
from datasets.workers import Begin, Loader, as_in_no_worker
from gan.files.errors import UserError
from gan.making import drawing_from, seed_generators
from gan.noise import seed_for
from gan.ranks import number_and_size

END = object()  # what comes after the last sample of a stream


class GlobalLoader(ResumableLoader):
    """A DataLoader for any data set with a length. Ranks together get the batches that one device gets.

    `batch_size` counts the samples of all ranks. In training the order is shuffled (not with `shuffle=False`) and an
    incomplete last batch is dropped. A `sampler`, such as a WeightedRandomSampler, gives another order. What the data
    set draws at random for a sample, by torch's, NumPy's and Python's global generators, depends on (seed, epoch,
    index) alone, also in workers. Checkpoints save the position; a run whose data set has other samples is not
    resumed, but with `new_data=True`, in another order. It may be made before the ranks are known. `prefetch_factor`
    and `worker_init_fn` are DataLoader's.
    """

    def __init__(
        self,
        dataset: Samples,
        batch_size: int,
        *,
        training: bool = True,
        shuffle: bool | None = None,
        sampler: Sampler[int] | None = None,
        seed: int = 0,
        workers: int = 0,
        prefetch_factor: int | None = None,
        worker_init_fn: Begin = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        new_data: bool = False,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise UserError(f"a {type(dataset).__name__} has no length; type GlobalStream in place of GlobalLoader")
        how: dict[str, Any] = dict(workers=workers, prefetch_factor=prefetch_factor, worker_init_fn=worker_init_fn)
        how |= dict(collate_fn=collate_fn, new_data=new_data)
        order: dict[str, Any] = dict(training=training, shuffle=shuffle, seed=seed)
        self.again = partial(GlobalLoader, dataset, batch_size, sampler=sampler, **order, **how)
        if sampler is not None and shuffle:
            raise UserError("a sampler makes the order; leave shuffle=True out")
        count = len(dataset) if sampler is None else len(sampler)  # pyrefly: ignore[bad-argument-type]
        rank, ranks = number_and_size()
        check_divides(batch_size, ranks, "batch_size=")
        if training and count < batch_size:
            raise UserError(f"{count} samples do not fill a batch of {batch_size}; make batch_size smaller")
        if not training:
            check_held_out(count, ranks)
        batches = GlobalBatches(count, batch_size, ranks=ranks, rank=rank, order=sampler, **order)
        super().__init__(Seeded(dataset, seed, collate_fn is None), batches, **how, keep_workers=False)


class GlobalStream(Loader):
    """The same for a stream: an iterable of samples, such as an IterableDataset, with or without an end.

    Each rank, and each of its workers, reads the whole stream and keeps its own rows of the global batches; so a stream
    must not share its samples out by rank, and its get_worker_info() is None. What the stream draws at random is the
    same for all of them. An incomplete last batch is dropped. Checkpoints save no position: a resumed run reads the
    stream from its beginning.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        batch_size: int,
        *,
        seed: int = 0,
        workers: int = 0,
        prefetch_factor: int | None = None,
        worker_init_fn: Begin = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        how: dict[str, Any] = dict(workers=workers, prefetch_factor=prefetch_factor, worker_init_fn=worker_init_fn)
        how |= dict(collate_fn=collate_fn, seed=seed)
        self.again = partial(GlobalStream, stream, batch_size, **how)
        rank, self.ranks = number_and_size()
        check_divides(batch_size, self.ranks, "batch_size=")
        self.rows = Rows(stream, batch_size, rank, self.ranks, seed)
        super().__init__(self.rows, batch_size=batch_size // self.ranks, **how)

    def __iter__(self) -> Iterator[Any]:
        self.rows.passes += 1
        return super().__iter__()


class Seeded(Dataset):
    """A data set with the index (epoch, index), in which all global generators are seeded for each sample.

    With `pictures` those of Pillow become tensors, of which torch can make a batch.
    """

    def __init__(self, dataset: Samples, seed: int, pictures: bool) -> None:
        self.dataset, self.seed, self.pictures = dataset, seed, pictures

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, which: tuple[int, int]) -> Any:
        return self.__getitems__([which])[0]

    def __getitems__(self, many: Sequence[tuple[int, int]]) -> list[Any]:
        """torch asks for a whole batch: to put the generators' states aside takes 30 times as long as to seed them."""
        with drawing_from(self.seed):
            return [self._seeded(which) for which in many]

    def _seeded(self, which: tuple[int, int]) -> Any:
        seed_generators(seed_for("sample", self.seed, *which))
        sample = self.dataset[which[1]]
        named = list(sample.values()) if isinstance(sample, dict) else sample
        parts = named if isinstance(named, tuple | list) else [named]
        if self.pictures and any(isinstance(part, Image.Image) for part in parts):
            return to_tensors(as_item(sample))
        return sample


class Rows(IterableDataset):
    """This rank's rows of the global batches of a stream."""

    def __init__(self, stream: Iterable[Any], batch_size: int, rank: int, ranks: int, seed: int) -> None:
        self.stream, self.batch_size, self.seed = stream, batch_size, seed
        share = batch_size // ranks
        self.own = range(rank * share, (rank + 1) * share)
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        helper = get_worker_info()
        worker, workers = (0, 1) if helper is None else (helper.id, helper.num_workers)
        with drawing_from(seed_for("stream", self.seed, self.passes)), as_in_no_worker():
            samples = iter(self.stream)
        for batch in count():
            rows, number = self._batch(samples, batch)
            if number < self.batch_size:
                break
            if batch % workers == worker:
                yield from rows
        if batch == 0:
            once = iter(self.stream) is self.stream
            why = "it can be read only once: give an object whose __iter__ begins anew" if once else "make that smaller"
            raise UserError(
                f"pass {self.passes} over the {type(self.stream).__name__} gave {number} samples, and batch_size= "
                f"is {self.batch_size}; {why}"
            )

    def _batch(self, samples: Iterator[Any], batch: int) -> tuple[list[Any], int]:
        """This rank's rows of a batch, and how many samples the stream still has for it."""
        rows = []
        with drawing_from(self.seed), as_in_no_worker():
            for row in range(self.batch_size):
                seed_generators(seed_for("stream", self.seed, self.passes, batch * self.batch_size + row))
                sample = next(samples, END)
                if sample is END:
                    return rows, row
                if row in self.own:
                    rows.append(sample)
        return rows, self.batch_size
