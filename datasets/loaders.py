"""The one data module, and loaders of one's own data sets and streams, with the same batches at any number of ranks."""

from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from itertools import count
from typing import Any

from lightning.pytorch import LightningDataModule
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

from datasets.augment import Augment, Prepared, Samples, as_item, to_tensors
from datasets.batches import GlobalBatches, ResumableLoader, check_divides, check_held_out
from datasets.workers import Begin, Loader, as_in_no_worker, usual
from gan.files.errors import UserError
from gan.making import drawing_from, seed_generators
from gan.noise import seed_for
from gan.ranks import number_and_size

END = object()  # what comes after the last sample of a stream
MANY = 10**9  # samples of an epoch, whose order has no room in memory
FEW = 256  # held-out samples that a rank reads without workers


class GanData(LightningDataModule):
    """Training and held-out samples of a run. `batch_size` counts the samples of all ranks together.

    Each rank gets an equal part of every batch, and a sample's augmentation depends on its own number. So all ranks
    together see what one device would see. Held-out samples are not augmented or shuffled; validation uses the first
    `val_count` of them, by default all.

    `workers` are processes of each rank that prepare training batches, and those of many held-out samples. With None
    there are so many as the rank has CPUs, and at most 4. `new_data`: a resumed run may have other samples.
    """

    def __init__(
        self,
        train: Samples,
        val: Samples | None = None,
        *,
        batch_size: int,
        val_count: int | None = None,
        workers: int | None = 0,
        seed: int = 0,
        flip: bool = True,
        crop: bool = False,
        new_data: bool = False,
    ) -> None:
        super().__init__()
        self.train, self.val = train, val
        self.batch_size = batch_size
        self.val_count = min(val_count or len(val), len(val)) if val is not None else 0
        self.asked_workers, self.seed, self.flip, self.crop = workers, seed, flip, crop
        self.new_data = new_data

    @property
    def workers(self) -> int:
        if self.asked_workers is not None:
            return self.asked_workers
        return usual(self.trainer.world_size // self.trainer.num_nodes if self.trainer is not None else 1)

    def setup(self, stage: str | None = None) -> None:
        """Refuse, before the first step, what cannot be split into equal parts."""
        self.check(self._rank_of_ranks()[1])

    def check(self, ranks: int) -> None:
        """Refuse what so many ranks cannot share."""
        count = len(self.train)
        check_divides(self.batch_size, ranks, "--batch-size ", count)
        if count < self.batch_size:
            # A power of two for each rank: where the ranks are not known yet, most of them can share that too.
            fewer = min(ranks, 1 << count.bit_length() >> 1) or 1
            fits = fewer << (count // fewer).bit_length() >> 1
            advice = f"try --batch-size {fits}" + f" on {fewer} rank{'s' * (fewer > 1)}" * (fewer < ranks)
            if self.new_data:
                advice = f"a resumed run keeps its batch, so give it {self.batch_size} or more to train on"
            what = f"{count} training samples do" if count != 1 else "1 training sample does"
            raise UserError(f"{what} not fill a batch of {self.batch_size}; {advice}")
        if self.val is not None:
            check_held_out(self.val_count, ranks, by=" by --held-out")

    def train_dataloader(self) -> ResumableLoader:
        """This rank's part of the training batches, in another order in every epoch."""
        augment = Augment(self.seed, self.flip, self.crop, getattr(self.train, "flip_pairs", ()))
        return self._loader(Prepared(self.train, augment), len(self.train), self.batch_size, training=True)

    def val_dataloader(self) -> ResumableLoader | list:
        """This rank's part of the held-out batches, in order. The last batch may be smaller."""
        if self.val is None:
            return []
        return self._loader(Prepared(self.val), self.val_count, self.batch_size, training=False)

    def _loader(self, dataset: Prepared, count: int, batch_size: int, training: bool) -> ResumableLoader:
        rank, ranks = self._rank_of_ranks()
        sampler = GlobalBatches(count, batch_size, ranks=ranks, rank=rank, seed=self.seed, training=training)
        workers = self.workers if training or count > FEW else 0
        return ResumableLoader(dataset, sampler, workers=workers, new_data=self.new_data)

    def _rank_of_ranks(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer is not None else (0, 1)


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
        if sampler is not None and not (isinstance(sampler, Sized) and len(sampler) < MANY):
            raise UserError(
                f"{type(sampler).__name__} has no end; let its __len__ return how many samples the whole "
                f"training takes, steps times batch_size, for the next epoch would begin its order anew"
            )
        count = len(dataset) if sampler is None else len(sampler)
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
