"""How ranks write a checkpoint together: at once, or in a thread while training goes on."""

import itertools
import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from gan.files.errors import UserError, reason
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


# [Note: beside training]
# On the main thread the ranks agree on who writes what, and each copies what it will write to host memory (`prepare`).
# Then training goes on. The thread writes and flushes the files. It meets the threads of the other ranks through
# torch's store (StoreRanks), never in a collective: training runs its own meanwhile. A thread that has failed asks the
# run to end, and all ranks raise the failure after the same step. Only a disk's failure may be excused: whoever saves
# is told of it at once, and nothing is raised.
#
# torch's `async_save` is not used. Its writer leaves incomplete folders behind when it is killed. Its stager copies
# whole storages, which is a bucket of all ranks where we want one rank's shard of it, and it keeps the copies between
# saves.


@dataclass(frozen=True)
class InBackground:
    """How a checkpoint is saved, passed through Lightning as its storage options."""

    excuse: Callable[[DiskError], None] | None = None


class Background:
    """The save that is in flight, if any, and what is done after it."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None  # made by the first save, because a strategy may be pickled
        self._tasks: list[Future[None]] = []
        self._excuse: Callable[[DiskError], None] | None = None

    def start(
        self,
        write: Callable[[], None],
        failed: Callable[[], None],
        excuse: Callable[[DiskError], None] | None = None,
    ) -> None:
        """Begin to write. `failed` is called in the thread if that, or what is done afterwards, raises an error.

        With `excuse`, that is called in its place with a DiskError, which `wait` then does not raise.
        """
        assert not self._tasks, "one save at a time"
        self._thread = self._thread or ThreadPoolExecutor(1, "checkpoint")
        self._failed, self._excuse = failed, excuse
        self._submit(write)

    def afterwards(self, deed: Callable[[], None]) -> None:
        """Do it when the checkpoint in flight is whole, and never if it fails. Without one, do it now."""
        if not self._tasks:
            deed()
            return
        before = list(self._tasks)
        self._submit(lambda: None if any(task.exception() for task in before) else deed())

    def _submit(self, deed: Callable[[], None]) -> None:
        def told() -> None:
            try:
                deed()
            except BaseException as error:
                if self._excused(error):
                    self._excuse(error)
                else:
                    self._failed()
                raise

        self._tasks.append(self._thread.submit(told))

    def _excused(self, error: BaseException | None) -> bool:
        return self._excuse is not None and isinstance(error, DiskError)

    def wait(self) -> None:
        """Return when nothing is in flight. What has failed is raised, once, if it is not excused."""
        wait(self._tasks)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if not self._excused(task.exception()):
                task.result()

    def settle(self) -> None:
        """The same while another error is raised: a failure is a warning."""
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other error came first
            rank_zero_warn(str(error))

    def close(self) -> None:
        """End the thread."""
        self.wait()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
