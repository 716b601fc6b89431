"""Ending: ranks that are told to end do so after the same step."""

import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from lightning.pytorch.utilities.exceptions import SIGTERMException

from strategies.private import default_store

# A terminal that is closed, and what clusters send before a time limit, tell a run to end as SIGTERM does.
OTHERS = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
SIGNALS = (signal.SIGTERM, *OTHERS)


class Signals:
    """Handlers of signals that are put back as they were.

    One of `OTHERS` that is ignored stays so: nohup wants a run to go on. Where `gently`, so does one that has a
    handler, such as Lightning's on SLURM.
    """

    def __init__(self) -> None:
        self.before: dict[int, Any] = {}

    def take(
        self, numbers: Iterable[int], handler: Callable[[int, FrameType | None], None], gently: bool = False
    ) -> None:
        """Handle them from now on; only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in numbers:
            there = signal.getsignal(number)
            if (number in OTHERS and there == signal.SIG_IGN) or (gently and there != signal.SIG_DFL):
                continue
            self.before[number] = signal.signal(number, handler)

    def give_back(self) -> None:
        """As they were."""
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}


class Stopped(SIGTERMException):
    """The run was told to end and does so between two steps, on all ranks: not a failure."""

    agreed = True


class Ending:
    """Whether the run shall end here, between two steps; the same answer on all ranks.

    By hand, because Lightning asks in a collective before every step, for which each rank waits once more for the
    slowest and a GPU for its queue; and a signal's handler of its own starts another in the midst of whatever goes on.

    [Note: the same step]
    `wish` only takes note, on any rank at any time. At its next look that rank writes how many phases it has played
    into the store through which the ranks have found each other; every rank ends where it has played more. None can
    miss it: no phase ends on any rank before it has begun on all, as its gradients are reduced, and the next one began
    after that was written. So a look is one question to rank 0's host, which waits for no other rank.
    """

    def __init__(self, run: str = "") -> None:
        """For one process; for several, which know this run by a name of its own."""
        self.key = f"end of {run}"
        self.store = default_store() if run else None
        self.played = 0  # phases
        self.due = False
        self.wished = False
        self._looked = 0

    def wish(self, *_: Any) -> None:
        """Also as a signal's handler: end soon."""
        self.wished = True

    def look(self) -> bool:
        """Whether to end here. Looks once between two steps, whoever asks."""
        if self._looked != self.played:
            self._looked = self.played
            self.due = self.wished if self.store is None else self._written()
        return self.due

    def _written(self) -> bool:
        if self.wished:
            played = int(self.store.compare_set(self.key, "", str(self.played)))  # only the first one counts
        elif self.store.check([self.key]):
            played = int(self.store.get(self.key))
        else:
            return False
        return self.played > played
