"""The held-out samples of a run and what its game shows of them, wherever its loaders are: of GanData or its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from datasets import GanData
from datasets.loaders import alone
from gan.runs import Run
from gan.sound import Sound
from strategies import random_state
from strategies.hooks import overrides
from strategies.micro_batches import first_rows, join_batches, rows

NOTHING_HELD_OUT = "nothing is held out: these are samples that it trains on"
MOST = 1000  # samples that are read of those that a run trains on; their loader may have no end


@dataclass
class FirstRank:
    """What data may ask a trainer."""

    world_size: int
    global_rank: int = 0
    overfit_batches: float = 0
    global_step: int = 0


def has_numbers(data: LightningDataModule | None) -> bool:
    """Whether held-out samples, and those to train on, are known by their numbers."""
    return isinstance(data, GanData) and data.val is not None


@contextmanager
def ready(run: Run, ranks: int = 1) -> Iterator[LightningDataModule | LightningModule]:
    """Inside the `with`, what has the run's loaders, ready to make those of the first rank of so many."""
    first = FirstRank(ranks)
    if run.data is not None:
        run.data.trainer = first
        run.data.prepare_data()
        run.data.setup("fit")
        yield run.data
        return
    before, run.game._trainer = run.game._trainer, first
    try:
        yield run.game
    finally:
        run.game._trainer = before


def batches_of(source: LightningDataModule | LightningModule, kind: str = "val") -> Iterator[Any]:
    """The batches of a loader, "val" or "train"; none where there is no such loader."""
    base = LightningDataModule if isinstance(source, LightningDataModule) else LightningModule
    loader = getattr(source, f"{kind}_dataloader")() if overrides(source, f"{kind}_dataloader", base) else []
    return (batch for batch, *_ in CombinedLoader(loader, "min_size" if kind == "train" else "sequential"))


def samples(run: Run, most: int | None = None) -> tuple[Iterator[Any], bool]:
    """Batches of the first held-out samples, as one device reads them, and whether they are held out.

    If nothing is held out, they are of samples that the run trains on, and at most MOST of them.
    """
    with alone(), ready(run) as source:
        first = list(islice(found := batches_of(source), 1))
        if first:
            return _cut(chain(first, found), most), True
        return _cut(batches_of(source, "train"), min(most or MOST, MOST)), False


def first_samples(batches: Iterator[Any], count: int) -> Any | None:
    """The first samples as one batch; None if there are none."""
    found = list(_cut(batches, count))
    return join_batches(found) if found else None


@torch.no_grad()
def shown(game: Any, batch: Any, seed: int = 0) -> dict[str, Tensor | Sound]:
    """The columns that a game shows of a batch, with the noise of a seed; none if it has no `show(batch)`."""
    with random_state.untouched():
        random_state.reseed(seed)
        return game.show(batch) if hasattr(game, "show") else {}


def _cut(batches: Iterator[Any], most: int | None) -> Iterator[Any]:
    """The batches of the first samples."""
    left = most
    for batch in batches:
        if left is not None and rows(batch) > left:
            batch = first_rows(batch, left)
        left = left and left - rows(batch)
        yield batch
        if left == 0:
            return
