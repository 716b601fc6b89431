"""What a rank does when another rank ends unexpectedly: one message names that rank and the reason, and all end.

    a rank is killed, or its host is unreachable    the message names it at once
    a rank ends with an error of its own            the message is that error: a UserError's text, or the error's name
    all ranks raise the same error together         no message (the error's `agreed` is true)

The first rank of each host prints the message; about the first rank, the next one does. The other ranks wait quietly,
and are usually ended meanwhile.

It is written by hand, because the main thread of a survivor waits in a collective for the rank that will not come. gloo
may raise an error at once; NCCL usually does not return. If the main thread raises within some seconds, its error is
replaced by one that names the rank. If it does not, the process is ended, because there is no other way out of a
collective. Without the lost rank the process group cannot be used any more. So a survivor ends after LIMIT at the
latest, whatever its program does.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from gan.files.errors import RankLost, UserError, printable
from strategies.processes import agent
from strategies.processes.failure import REFUSED, Failure, ended, failed, report
from strategies.processes.lifeline import Lifeline

GRACE = 5.0  # seconds for the main thread to leave training by itself, after a rank was lost
PATIENCE = 10.0  # the same after a rank has raised an error: all may be about to raise the same one
QUIET = 3.0  # additional seconds for ranks that do not print
LIMIT = 12.0  # seconds after which a survivor of a lost rank has ended; with the lifeline's SILENCE less than 30
LOOK = 0.25  # seconds between two checks of parent and children, until the lifeline is connected
STATUS = 2  # the exit status of a command that failed


class Survivor:
    """Watches over one rank, from its launch until it leaves training.

    `first` is the first rank of this host. `children` are the processes that this one has started, by rank. They end
    with it. `parent` is the process id of the first rank, if that has started this one. Until the lifeline is
    connected, parent and children watch each other.
    """

    def __init__(
        self,
        rank: int,
        first: int = 0,
        children: Mapping[int, subprocess.Popen] | None = None,
        parent: int | None = None,
    ) -> None:
        self.rank, self.first, self.children, self.parent = rank, first, children or {}, parent
        self.lifeline = Lifeline(rank, self.heard)
        self.advice = ""  # what to type
        self.saved: Callable[[], bool] = lambda: True  # whether there is a checkpoint to go on from
        self.beside: Callable[[int], str] = lambda lost: ""  # where a lost rank was in the game, and where this one is
        self.settle: Callable[[], object] = lambda: None  # finishes what the ranks still do together
        self._end: Failure | None = None
        self._tied, self._known, self._out = threading.Event(), threading.Event(), threading.Event()
        self._said = self._failed = False
        if children or parent:
            threading.Thread(target=self._look_after_family, name="lifeline-family", daemon=True).start()

    # ---- beginning ----

    def _look_after_family(self) -> None:
        """Watch parent and children. Lightning's own check ends all ranks with SIGKILL and names none."""
        here = self.lifeline.obituary
        while not (self._out.is_set() or self._tied.wait(LOOK)):
            for rank, child in self.children.items():
                if child.poll() is not None:
                    return self.heard(replace(here, rank=rank, process=child.pid))
            if self.parent is not None and os.getppid() != self.parent:
                return self.heard(replace(here, rank=self.first, process=self.parent))
        return None

    def tie(self, store: dist.Store, size: int, host: str, advice: str) -> None:
        """Connect to rank 0, which the others reach at `host`. It passes that, and its advice, through the store.

        All ranks call it, before or after they make the process group. None waits for the others.
        """
        key = f"lifeline {(store.add('tied', 1) - 1) // size}"  # a store may serve several trainings
        if self.rank == 0:
            store.set(key, json.dumps([advice, host, *self.lifeline.listen(host)]))
        self.advice, host, port, token = json.loads(store.get(key))
        try:
            if self.rank:
                self.lifeline.join(host, port, token)
        except OSError as error:
            warnings.warn(
                f"rank {self.rank} cannot reach rank 0 at {host} port {port} ({error}), so if it is lost the others "
                f"will notice only after torch's time limit; allow the hosts to connect to each other on all ports",
                stacklevel=2,
            )
        self._tied.set()

    # ---- ending ----

    @property
    def lost(self) -> bool:
        """Whether some rank is gone without a word."""
        return self._end is not None and self._end.lost

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the function, which is this rank's training. The other ranks are notified of how it ends."""
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            self.settle()
            named = self._named(error)
            if named is None:
                raise
            raise named from error
        finally:
            self._out.set()
            self.lifeline.leave()

    def _named(self, error: BaseException) -> RankLost | None:
        """The error that names the rank that caused this error; None if the error is this rank's own."""
        if getattr(error, "agreed", False):
            return None
        follows = of_a_collective(error)
        self._known.wait(GRACE if follows else 0)
        self._failed = True
        self._out.set()  # from here on only the main thread prints
        end = self._end
        lost = end is not None and end.lost and isinstance(error, Exception) and not isinstance(error, UserError)
        if end is None or not (follows or lost):
            atexit.register(self.end_children, QUIET / 2, list(self.children))  # before they print anything
            own = failed(self.rank, error)
            self.lifeline.leave(replace(own, why=own.why[:8000]))
            return None
        if not self._speaks(end):
            time.sleep(QUIET)
        self.end_children(GRACE, () if end.whole else self.children.keys() & {end.rank})
        named = self._follows(end)
        named.said = self._said
        return named

    def _follows(self, end: Failure) -> RankLost:
        named = RankLost(self._words(end))
        named.refused = end.kind == REFUSED
        return named

    def heard(self, end: Failure) -> None:
        """Called in a thread of its own when a rank has ended.

        Prints the message, waits for the main thread to leave training, and ends the process if that takes too long.
        """
        since = time.monotonic()
        if self._known.is_set():  # the family knew it before the lifeline
            return
        if end.lost and (child := self.children.get(end.rank)) is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1)
                end = ended(end.rank, child.pid, end.host, child.returncode)
        self._end, speaks = end, self._speaks(end)
        if end.lost and speaks:
            self._say(end)
        self._known.set()  # after the message, so that the main thread knows that it is said
        if not self._out.wait((GRACE if end.lost else PATIENCE) + (0 if speaks else QUIET)):
            self._say(end)
            self._finish(self._follows(end))
        if end.lost and self._failed:
            time.sleep(max(0.0, LIMIT - (time.monotonic() - since)))
            self._finish(self._follows(end))

    def _speaks(self, end: Failure) -> bool:
        """Whether this rank prints the message on its host."""
        return self.rank == (self.first + 1 if end.rank == self.first else self.first)

    def _say(self, end: Failure) -> None:
        if not self._said:
            self._said = True
            if agent.speaks() and end.host == self.lifeline.obituary.host:
                return  # the agent says how it ended
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                print(printable(f"\nerror: {self._words(end)}"), file=sys.stderr, flush=True)  # below the progress bar

    def _words(self, end: Failure) -> str:
        if not self._speaks(end):
            return f"rank {self.rank} ends as well: {end}"
        places = self.beside(end.rank) if end.lost else ""
        said = f"{end}; {places}" if places else str(end)
        if end.whole or not self.advice:
            return said
        if not self.saved():
            return f"{said}\nAll ranks end, and there is no checkpoint yet; type the same command again"
        return f"{said}\nAll ranks end; go on from the last whole checkpoint with\n  {self.advice}"

    def interrupt(self, why: str, status: int) -> None:
        """End this process, and tell the other ranks why. Called in a signal handler."""
        self._out.set()
        self.lifeline.leave(replace(self.lifeline.obituary, why=why, kind=REFUSED))
        self._finish(UserError(why), status)

    def end_children(self, patience: float = 0.0, those: Iterable[int] = ()) -> None:
        """Kill the ranks that this process started. `those` get some seconds to end by themselves."""
        until = time.monotonic() + patience
        with contextlib.suppress(subprocess.TimeoutExpired):
            for rank in those:
                self.children[rank].wait(max(0.0, until - time.monotonic()))
        for child in self.children.values():
            child.kill()

    def _finish(self, error: UserError, status: int = STATUS) -> None:
        """End this process and its children at once: there is no other way out of a collective."""
        report(error)
        self.end_children()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(status)


def of_a_collective(error: BaseException | None) -> bool:
    """Whether this error, or one that it was made of, is torch's for a broken connection of the process group."""
    if error is None or isinstance(error, dist.DistError):
        return error is not None
    words = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe")
    if isinstance(error, RuntimeError) and any(word in str(error) for word in words):
        return True
    return of_a_collective(error.__cause__ or (None if error.__suppress_context__ else error.__context__))
