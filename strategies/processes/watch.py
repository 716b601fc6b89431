"""Ends a rank that was told to end while it waits for the others in vain.

A wish to end is looked at between two steps (see stopping.py). But if the ranks have gone different ways, a rank may
wait in a collective until the time limit, which is half an hour by default. There, Python cannot even see the signal.
"""

import select
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable

from gan.files.system import after_fork
from strategies.processes.places import ADVICE, Places, call_of_ranks
from strategies.processes.stopping import Signals

TICK = 2.0  # seconds between two looks
SLOW = 5.0  # seconds after which a rank writes where it is, for the others
LEAST = 10.0  # seconds that a rank has to end by itself
TIMES = 10  # a phase that takes so many times its longest time is stuck
FIRST = 60.0  # seconds in which a rank begins to train
NEW = 30.0  # seconds that stand for the longest time of a phase that has not ended before: it may have to compile
END = b"\0"  # no signal has this number


class Watch:
    """A thread beside the main thread of a rank, while it trains.

    [Note: a signal in a collective]
    Python calls signal handlers in its main thread, between two of its instructions. In a collective there is none. But
    it writes the signal's number to a socket at once (signal.set_wakeup_fd), and a thread can read that.

    [Note: slow or stuck]
    A phase that is only slow must not be ended. So it counts as stuck if it takes ten times as long as it ever took.
    Validation, saving, and what is done between steps count never. Before the first phase has ended, a minute
    is too long: little can be lost there. And nothing is ended if nobody wished it: then the time limit of the process
    group decides.
    """

    def __init__(self, places: Places, end: Callable[[str], None]) -> None:
        """`end` ends this rank, with a reason. It is called in the thread. Make the watch in the main thread."""
        self.places, self.end = places, end
        self.main = threading.main_thread().ident or 0
        self.hear, self.tell = socket.socketpair()
        self.tell.setblocking(False)
        self.before = signal.set_wakeup_fd(self.tell.fileno(), warn_on_full_buffer=False)
        self.told = ""  # the place that was written
        _OPEN.add(self)
        self.thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """End the thread. The main thread calls it."""
        signal.set_wakeup_fd(self.before)
        self.tell.send(END)
        self.thread.join()
        self._let_go()

    def _let_go(self) -> None:
        self.tell.close()
        self.hear.close()

    def _watch(self) -> None:
        wish, wished = 0, 0.0
        heard = select.poll()  # select.select knows no handles from 1024 on
        heard.register(self.hear, select.POLLIN)
        while True:
            if heard.poll(1000 * TICK):
                numbers = self.hear.recv(64)
                if END in numbers:
                    return
                if not wish and wishes() & set(numbers):
                    wish, wished = min(wishes() & set(numbers)), time.monotonic()
            now, since = time.monotonic(), self.places.since
            if now - since > SLOW:
                self._write()
            if wish and now - max(wished, since) > LEAST and self.stuck(now - since):
                self.end(self._why(wish, now - since))

    def stuck(self, seconds: float) -> bool:
        """Whether so many seconds in its place are too many for this rank. See [Note: slow or stuck]."""
        places = self.places
        if not places.longest:
            return seconds > FIRST
        return places.here.playing and seconds > TIMES * places.longest.get(places.here.phase, NEW)

    def _write(self) -> None:
        """Write where this rank is. The main thread cannot do that."""
        self.places.waiting = call_of_ranks(traceback.walk_stack(sys._current_frames().get(self.main)))
        if not self.told:
            self.places.connect()
        if str(self.places) != self.told:
            self.told = str(self.places)
            self.places.tell()

    def _why(self, wish: int, seconds: float) -> str:
        told = f"{signal.Signals(wish).name} asked this run to end, but"
        elsewhere = self.places.elsewhere()
        if elsewhere:
            return f"{told} {elsewhere}, and so they wait for each other for {seconds:.0f} s; {ADVICE}"
        return f"{told} rank {self.places.world.rank} {self.places} for {seconds:.0f} s, which is longer than ever"


def wishes() -> set[int]:
    """The signals that ask this run to end. In training Lightning handles the first two."""
    return {signal.SIGINT, signal.SIGTERM, *Signals.taken}


_OPEN: "weakref.WeakSet[Watch]" = weakref.WeakSet()


def _forget() -> None:
    """In a forked process, such as a loader's worker: its signals are no wishes of this rank."""
    for each in list(_OPEN):
        if each.tell.fileno() >= 0:
            signal.set_wakeup_fd(-1)
            each._let_go()


after_fork(_forget)
