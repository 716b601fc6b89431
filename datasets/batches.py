"""Batches that are the same at any number of ranks, and a loader that continues where it stopped."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, DistributedSampler

from datasets.workers import Loader
from gan.files.checkpoint import checksum
from gan.files.errors import UserError
from gan.making import drawing_from
from gan.noise import seed_for

NEW_DATA = "to go on with what is there now, type --new-data"


class GlobalBatches(DistributedSampler):
    """This rank's part of every global batch, as pairs (epoch, index). A second pass in an epoch has another number.

        the order of an epoch   |  global batch 0   |  global batch 1   |  ...
        with two ranks          | rank 0  | rank 1  | rank 0  | rank 1  |

    In training, the order is shuffled by (seed, epoch), and an incomplete last batch is dropped. Otherwise the order
    is that of the data, and the last batch may be smaller: only samples that would make ranks unequal are left out.
    `shuffle` can be set by itself. A sampler of the author's gives another `order`, drawn by (seed, epoch) too.

    It is a DistributedSampler, so that Lightning does not replace it and tells it the epoch.
    """

    def __init__(
        self,
        length: int,
        batch_size: int,
        *,
        ranks: int = 1,
        rank: int = 0,
        seed: int = 0,
        training: bool = True,
        shuffle: bool | None = None,
        order: Iterable[int] | None = None,
    ) -> None:
        shuffle = training if shuffle is None else shuffle
        # pyrefly: ignore[bad-argument-type] - torch asks for the length alone
        super().__init__(range(length), num_replicas=ranks, rank=rank, shuffle=shuffle, seed=seed, drop_last=True)
        assert batch_size % ranks == 0, "checked by the loaders"
        self.length, self.batch_size, self.training, self.order = length, batch_size, training, order
        self.used = length - length % (batch_size if training else ranks)
        self.first_batch = 0  # where the next pass begins
        self.passes = 0  # that have begun in this epoch: a shorter set of several is read again and again
        self.skipped = 0  # how many epochs the caller of set_epoch is ahead of us
        self._resumed: int | None = None  # the epoch that was resumed, until the next pass begins

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass. A new epoch starts at its beginning; a resumed one continues."""
        # See [Note: an empty epoch]
        if self._resumed is not None:
            self.skipped = max(self.skipped, epoch - self._resumed - 1)
        if epoch - self.skipped != self.epoch:
            self.epoch, self.first_batch, self.passes = epoch - self.skipped, 0, 0

    # [Note: an empty epoch]
    # If a run is counted in steps and its checkpoint is from the end of epoch e, Lightning first goes through epoch
    # e + 1 without any batch, and calls the next one e + 2. We remember that Lightning is one ahead of us.

    def resume(self, epoch: int, batch: int, skipped: int = 0, passes: int = 0) -> None:
        """Let the next pass begin inside an epoch."""
        self.epoch, self.first_batch, self.skipped, self.passes = epoch, batch, skipped, passes
        self._resumed = epoch

    def __len__(self) -> int:
        return self.used // self.num_replicas

    def __iter__(self) -> Iterator[tuple[int, int]]:
        first, self.first_batch, self._resumed = self.first_batch, 0, None
        epoch, order = self.epoch + (self.passes << 32), range(self.length)
        self.passes += self.training
        seed = seed_for("order", self.seed, epoch)
        if self.order is not None:
            with drawing_from(seed):
                order = list(islice(self.order, self.length))  # it may have no end
        elif self.shuffle:
            dice = torch.Generator().manual_seed(seed)
            order = torch.randperm(self.length, generator=dice).tolist()
        for start in range(first * self.batch_size, self.used, self.batch_size):
            share = (min(start + self.batch_size, self.used) - start) // self.num_replicas
            mine = start + self.rank * share
            for index in order[mine : mine + share]:
                yield epoch, index


def check_divides(batch: int, ranks: int, option: str, most: int | None = None) -> None:
    """Refuse a batch that ranks cannot share equally. `option` is what to type before a number, `most` at most."""
    if batch < 1:
        raise UserError(f"batch {batch} is empty; try {option}{ranks}")
    if batch % ranks:
        below, fits = batch // ranks * ranks, max(fewer for fewer in range(1, ranks) if batch % fewer == 0)
        sizes = [f"{option}{size}" for size in (below, below + ranks) if 0 < size <= (most or size)]
        advice = ", or ".join([" or ".join(sizes)] * bool(sizes) + [f"{fits} rank{'s' * (fits > 1)}"])
        raise UserError(f"batch {batch} is not divisible by {ranks} ranks; try {advice}")


def check_held_out(count: int, ranks: int, by: str = "") -> None:
    """Refuse, or name, what ranks cannot share equally of the samples that are not trained on. `by` is their option."""
    from lightning.pytorch.utilities import rank_zero_warn

    if count < ranks:
        raise UserError(f"{count} held-out samples are too few for {ranks} ranks; hold out {ranks} or more{by}")
    if left := count % ranks:
        rank_zero_warn(f"{left} of {count} held-out samples are left out, so that {ranks} ranks get equally many")


class ResumableLoader(Loader):
    """A loader of GlobalBatches whose position is saved in checkpoints.

    The position counts batches that were handed out, not batches that workers have prepared. It counts global
    batches, so a run can resume on another number of ranks.
    """

    sampler: GlobalBatches  # pyrefly: ignore[bad-override-mutable-attribute] - nobody puts another in its place
    ahead = 0  # of the batches that were handed out, so many wait to be trained on

    def __init__(
        self,
        dataset: Dataset,
        sampler: GlobalBatches,
        *,
        workers: int = 0,
        new_data: bool = False,
        keep_workers: bool = True,
        **settings: Any,
    ) -> None:
        """`new_data`: go on though there are other samples than before, at the same place in another order.

        `keep_workers` from epoch to epoch: not for a data set that a program may change in between.
        """
        self.new_data, self._names = new_data, names_sum(getattr(dataset, "dataset", dataset))
        super().__init__(
            dataset,
            batch_size=sampler.batch_size // sampler.num_replicas,
            sampler=sampler,
            persistent_workers=keep_workers and workers > 0,
            seed=sampler.seed,
            workers=workers,
            **settings,
        )
        self._position = [0, 0, 0]

    def __iter__(self) -> Iterator[Any]:
        # See [Note: the epoch comes late]
        position = self._position = [self.sampler.epoch, self.sampler.first_batch, self.sampler.passes]
        for item in super().__iter__():
            position[1] += 1
            yield item
        position[1] += self.ahead  # none of them waits

    # [Note: the epoch comes late]
    # Lightning makes an iterator before it calls set_epoch. When it resumes from the end of an epoch, it makes no
    # other one, and workers would already have prepared batches of the wrong epoch. Our iterator is a generator:
    # it runs only when the first batch is asked for, and then the epoch is known.

    @property
    def ranks(self) -> int:
        return self.sampler.num_replicas

    def signs(self) -> tuple[int, list[int]]:
        """How many samples there are, and numbers that tell three of them, read twice: what ranks must have alike."""
        length = len(self.dataset)  # pyrefly: ignore[bad-argument-type] - each has one
        some = [(0, index) for index in sorted({0, length // 2, length - 1} if length else ()) for _ in range(2)]
        return length, [number for both in self.read(some, 2, _signs) for number in both]

    def read(self, asked: list[tuple[int, int]], batch_size: int, collate_fn: Callable[[list[Any]], Any]) -> list[Any]:
        """Batches of these samples, read as in training: by a worker, if there are any, because files may not be
        opened before workers are forked.
        """
        how: dict[str, Any] = dict(seed=self.sampler.seed, worker_init_fn=self.worker_init_fn, collate_fn=collate_fn)
        workers = min(1, self.num_workers)
        return [*Loader(self.dataset, sampler=asked, batch_size=batch_size, workers=workers, **how)]

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were trained on."""
        epoch, batch, passes = self._position
        batch = max(0, batch - self.ahead)
        return {"epoch": epoch, "batch": batch, "passes": passes, "skipped": self.sampler.skipped, **self._order()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the last batch that was handed out."""
        if self.state_dict().keys() - state.keys() - {"passes", "names"}:  # older versions had none
            raise UserError("the run was trained with another kind of loader; resume with that one, or begin a new run")
        for name, value in self._order().items():
            before, of_data = state.get(name, value), name in ("samples", "names")
            if before != value and not (self.new_data and of_data):
                what = {
                    "samples": f"{before} samples, and has {value} now",
                    "names": "as many samples as now, but some have other names",
                }.get(name, f"{name.replace('_', ' ')} {before}, and has {value} now")
                own = "" if self._names is not None else ", or make a loader of your own with new_data=True"
                advice = NEW_DATA + own if of_data else f"resume with {before}, or begin a new run"
                raise UserError(f"the run was trained with {what}; {advice}")
        passes = state.get("passes", 0)
        self.sampler.resume(state["epoch"], state["batch"], state["skipped"], passes)
        self._position = [state["epoch"], state["batch"], passes]

    def _order(self) -> dict[str, int]:
        """What the order of samples depends on, which must not change when a run resumes."""
        order = {"seed": self.sampler.seed, "batch_size": self.sampler.batch_size, "samples": self.sampler.length}
        return order if self._names is None else {**order, "names": self._names}


def names_sum(dataset: Any) -> int | None:
    """A checksum of the samples' names, which decide their order and which are held out; None where they have none."""
    names = getattr(dataset, "sample_names", None)
    return None if names is None else zlib.crc32(b"\0".join(names))


def _signs(samples: list[Any]) -> list[int]:
    return [zlib.crc32("".join(map(_sign, tree_leaves(sample))).encode()) for sample in samples]


def _sign(value: Any) -> str:
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:
        return str(checksum(value.as_subclass(Tensor)))
    if isinstance(value, Image.Image):
        value = np.asarray(value)
    if isinstance(value, np.ndarray | np.generic) and value.dtype != object:
        return str(zlib.crc32(np.ascontiguousarray(value).tobytes()))
    if isinstance(value, np.ndarray):
        return "".join(map(_sign, value.flat))
    if is_dataclass(value):
        return "".join(_sign(leaf) for field in fields(value) for leaf in tree_leaves(getattr(value, field.name)))
    return repr(value) if isinstance(value, str | bytes | int | float) else type(value).__name__
