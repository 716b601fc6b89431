"""Signals to end: all ranks end after the same step."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from gan.files.system import signals

# Like SIGTERM, these ask a run to end. A closed terminal sends SIGHUP; clusters send the next two before a time limit.
# Windows has only the last one, Ctrl-Break.
OTHERS = signals("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK")
SIGNALS = (signal.SIGTERM, *OTHERS)
WARNING = getattr(signal, "SIGUSR1", None)  # Slurm's: the job goes back into the queue; Lightning knows it by it too


def handle(numbers: Iterable[int], handler: Callable[..., object], gently: bool = False) -> ExitStack:
    """Handle these signals from now on. To close what it returns puts the earlier handlers back.

    A signal that the process ignores is left alone, because under nohup a run must continue. With `gently`, a signal
    that already has a handler is left alone too. Outside the main thread, which alone can set handlers, all are.
    """
    before = ExitStack()
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            there = signal.getsignal(number)
            if there != signal.SIG_IGN and (there == signal.SIG_DFL or not gently):
                before.callback(signal.signal, number, signal.signal(number, handler))
    return before


def tell(text: str) -> None:
    """Print below the progress bar. For signal handlers, which may be called in the midst of another `print`."""
    with suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


class Stopped(SIGTERMException):
    """The run ends between two steps, on all ranks, because of a signal. This is not a failure."""

    agreed = True


class Ending:
    """Decides, between two steps, whether the run ends here. The answer is the same on all ranks.

    It is written by hand. Lightning runs a collective before every step, in which each rank waits for the slowest one,
    and a GPU for its queue. And Lightning's signal handler starts another collective, at any moment.

    [Note: the same step]
    `wish` only sets a flag, on any rank at any time. At its next question this rank writes into torch's store how many
    phases it has played, and which signal it got. Every rank ends when it asks after having played more phases than
    that. No rank can miss the number. A phase reduces gradients, so it ends on no rank before it has begun on all. The
    writing rank begins its next phase after it has written, so every other rank that has played this phase finds the
    number. So a question is one query to rank 0's host, and waits for no other rank.

    [Note: how often]
    A query takes longer than the smallest step's arithmetic. So the ranks ask after every step only at first; then
    after every few steps, about four times a second. All must ask after the same steps. So each measures its own
    steps, and all take the number that the first of them has written into the store.
    """

    MEASURED = range(8, 16)  # the looks from one to the other of which the time is taken
    SECONDS, MOST = 0.25, 64  # between two questions; and steps

    def __init__(self, store: dist.Store | None = None) -> None:
        """`store` is that of this run, in which its ranks write; None if there is only one process."""
        self.store = store
        self.played = 0  # phases
        self.due = False
        self.wished = False
        self.signal = 0  # that ends the run, once it is due: the same on all ranks; 0 without a signal
        self.noted = 0  # the first signal that this rank has got
        self.stride = 1  # steps from one question to the next
        self._looked = self._looks = 0
        self._began = 0.0

    def wish(self, number: int = 0, *_: Any) -> None:
        """Ask the run to end soon. It can be used as a signal handler."""
        if not self.wished:
            self.noted, self.wished = int(number), True

    def look(self) -> bool:
        """Whether to end here. The answer stays the same until the next phase is played."""
        if self._looked != self.played:
            self._looked = self.played
            self._looks += 1
            if self.store is None:
                self.due, self.signal = self.wished, self.noted
            elif self._looks % self.stride == 0:
                self.due = self._written(self.store)
                self._measure(self.store)
        return self.due

    def _written(self, store: dist.Store) -> bool:
        if self.wished:
            written = store.compare_set("end", "", f"{self.played} {self.noted}")  # only the first one counts
        elif store.check(["end"]):
            written = store.get("end")
        else:
            return False
        played, self.signal = map(int, written.split())
        return self.played > played

    def _measure(self, store: dist.Store) -> None:
        """Choose the stride, once. See [Note: how often]."""
        if self._looks == self.MEASURED.start:
            self._began = time.monotonic()
        elif self._looks == self.MEASURED.stop:
            seconds = (time.monotonic() - self._began) / len(self.MEASURED)
            stride = max(1, min(self.MOST, int(self.SECONDS / max(seconds, 1e-6))))
            self.stride = int(store.compare_set("stride", "", str(stride)))
