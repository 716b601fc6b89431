"""Saves while training goes on: in a thread, one save at a time.

[Note: beside training]
On the main thread the ranks agree on who writes what, and each copies what it will write to host memory (`prepare` in
writing.py). Then training goes on. The thread writes and flushes the files. It meets the threads of the other ranks
through torch's store (StoreRanks), never in a collective: training runs its own meanwhile. A thread that has failed
asks the run to end, and all ranks raise the failure after the same step. Only a disk's failure may be excused: whoever
saves is told of it at once, and nothing is raised.

torch's `async_save` is not used. Its writer leaves incomplete folders behind when it is killed. Its stager copies whole
storages, which is a bucket of all ranks where we want one rank's shard of it, and it keeps the copies between saves.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from lightning.pytorch.utilities import rank_zero_warn

from strategies.checkpoint.ranks import DiskError


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
