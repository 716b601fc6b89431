"""The ranks that save or load together. If one rank fails, all raise an error."""

import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist

from gan.errors import UserError, reason
from strategies.private import default_store

T = TypeVar("T")


class DiskError(UserError):
    """The disk of one of the ranks has failed, or is full. All ranks that save together raise it."""


@dataclass(frozen=True)
class SavingRanks:
    rank: int = 0
    size: int = 1

    def each(self, step: Callable[[], T]) -> list[T]:
        """Run a step on all ranks. Returns all results. If one rank fails, all raise, so that none waits for it."""
        result, failure, told = None, None, None
        try:
            result = step()
        except (OSError, UserError) as error:
            failure, told = error, (DiskError if isinstance(error, OSError) else UserError, reason(error))
        except Exception as error:  # noqa: BLE001 - our own mistake, so it is no UserError on the other ranks
            failure, told = error, (RuntimeError, f"{type(error).__name__}: {error}")
        heard = self._gather((result, told)) if self.size > 1 else [(result, told)]
        if failure is not None:
            raise failure
        for rank, (_, told) in enumerate(heard):
            if told is not None:
                kind, text = told
                raise kind(f"rank {rank}: {text}")
        return [result for result, _ in heard]

    def first(self, step: Callable[[], None]) -> None:
        """Run a step on the first rank, while the others wait."""
        self.each(step if self.rank == 0 else lambda: None)

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


ALONE = SavingRanks()


@dataclass(frozen=True)
class StoreRanks(SavingRanks):
    """The same for a thread beside training. It uses torch's store, because its collectives would meet training's.

    `name` is of one save, the same on all ranks. `limit` is how many seconds a rank waits for the others; it gives up
    at once when `lost` says that one of them is gone.
    """

    name: str = ""
    limit: float = 1800.0
    lost: Callable[[], bool] = bool
    store: Any = field(default_factory=default_store)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def _gather(self, value: Any) -> list[Any]:
        """Rank 0 collects the values and shows them all. It waits until all have read them: it may be about to exit,
        and its host serves the store.
        """
        shown = f"{self.name}, {next(self.numbers)}"
        keys = [f"{shown}, rank {rank}" for rank in range(1, self.size)]
        if self.rank:
            own = keys[self.rank - 1]
            self.store.set(own, pickle.dumps(value))
            self._until(lambda: self.store.check([shown]))
            values = pickle.loads(self.store.get(shown))
            self.store.delete_key(own)
            return values
        self._until(lambda: self.store.check(keys))
        values = [value, *(pickle.loads(self.store.get(key)) for key in keys)]
        self.store.set(shown, pickle.dumps(values))
        for key in keys:
            self._until(lambda key=key: not self.store.check([key]))
        self.store.delete_key(shown)
        return values

    def _until(self, answer: Callable[[], bool]) -> None:
        """Ask again and again. `store.wait` would keep the main thread from the store."""
        until, pause = time.monotonic() + self.limit, 0.001
        while not answer():
            if self.lost():
                raise dist.DistError("a rank was lost while a checkpoint was written")
            if time.monotonic() > until:
                raise UserError(f"rank {self.rank} has waited {self.limit:g} seconds for what other ranks write")
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
