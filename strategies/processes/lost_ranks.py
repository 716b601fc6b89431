"""What a rank does when another one ends before its time: it says once which and why, and ends as well.

    a rank is killed, or its host goes dark    it is named at once
    a rank ends by an error of its own         that error is what is said: a UserError's words, any other by name
    all ranks end by agreement                 nothing is said (the error's `agreed` is true)

Rank 0 speaks, or rank 1 of rank 0; the others are silent for a while, in which they are ended as a rule. The main
thread of a survivor waits in a collective for one that will not come. gloo may raise at once, NCCL as a rule does not
return: what the main thread meets in a while is turned into the error that names the rank; after that the process is
ended, as there is no other way out of a collective. A rank that was lost leaves no process group to go on with, so
after LIMIT a survivor has ended whatever its program does.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn

from gan.errors import RankLost, UserError
from strategies.processes.lifeline import GONE, End, Lifeline

GRACE = 5.0  # seconds for the main thread to come out of training by itself, when a rank was lost
PATIENCE = 10.0  # the same when one has failed: all may be about to raise the same error
QUIET = 3.0  # more seconds for those that do not speak
LIMIT = 20.0  # seconds after which a survivor of a lost rank has ended
LOOK = 0.25  # seconds between two looks at the family, while there is no lifeline yet
STATUS = 2  # of a command that could not do what was asked


class Survivor:
    """One rank among others, from its launch until it leaves training.

    `children` are the ranks that this process has started, by rank; they end with it. `parent` is the rank that has
    started this one, and its process. Until the lifeline is tied, families look after each other.
    """

    def __init__(
        self,
        rank: int,
        children: Mapping[int, subprocess.Popen] | None = None,
        parent: tuple[int, int] | None = None,
    ) -> None:
        self.rank, self.children, self.parent = rank, children or {}, parent
        self.lifeline = Lifeline(rank, self.learned)
        self.advice = ""
        self.failed = False
        self._end: End | None = None
        self._known, self._tied, self._out = threading.Event(), threading.Event(), threading.Event()
        self._done = False
        self._said = False
        self._turn = threading.Lock()  # who says it: the main thread or the one that has learned it
        if self.children or self.parent:
            threading.Thread(target=self._look_after_family, name="lifeline-family", daemon=True).start()

    # ---- beginning ----

    def _look_after_family(self) -> None:
        """In place of Lightning's own look at the children, which ends all with SIGKILL and names nobody."""
        while not (self._out.is_set() or self._tied.wait(LOOK)):
            for rank, child in self.children.items():
                if child.poll() is not None:
                    lost = child.returncode < 0
                    return self.learned(End(rank, child.pid, socket.gethostname(), _how(child), lost=lost))
            if self.parent is not None and os.getppid() != self.parent[1]:
                return self.learned(End(*self.parent, socket.gethostname(), GONE, lost=True))
        return None

    def tie(self, host: str, advice: str, broadcast: Callable[[Any], Any], gather: Callable[[Any], list[Any]]) -> None:
        """Connect to rank 0, which is found at `host`; all ranks do so together, once there is a process group."""
        address, self.advice = broadcast((self.lifeline.listen([host]), advice) if self.rank == 0 else None)
        problems = gather(self.lifeline.join(address) if self.rank else None)
        if any(problems):
            self.lifeline.leave()
            rank, problem = next((rank, problem) for rank, problem in enumerate(problems) if problem)
            rank_zero_warn(
                f"rank {rank} cannot reach rank 0 ({problem}), so if a rank is lost the others will notice after "
                f"torch's time limit only; let the hosts connect to each other on all ports"
            )
        self._tied.set()

    # ---- ending ----

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it: this rank's training. However it ends, the others get to know."""
        try:
            result = function(*args, **kwargs)
            self._done = True
            return result
        except BaseException as error:
            named = self._named(error)
            if named is None:
                raise
            raise named from error
        finally:
            with self._turn:
                self._out.set()
            self.lifeline.leave()

    def _named(self, error: BaseException) -> RankLost | None:
        """The error that names the rank through which this one came; None if this one is this rank's own."""
        if getattr(error, "agreed", False):
            return None
        follows = any(map(_of_a_collective, _chain(error)))
        self._known.wait(GRACE if follows else 0)
        end, self.failed = self._end, True
        lost = end is not None and end.lost and isinstance(error, Exception) and not isinstance(error, UserError)
        if end is None or not (follows or lost):
            with self._turn:
                self._out.set()
            self.lifeline.leave(self._own_end(error))
            return None
        with self._turn:  # from here on the main thread speaks
            self._out.set()
            if end.lost and self._speaks(end):
                self._say(end)
        if not self._speaks(end):
            time.sleep(QUIET)
        self.end_children(end)
        named = RankLost(self._words(end))
        named.said = self._said
        return named

    def _own_end(self, error: BaseException) -> End:
        line = (str(error).strip().splitlines() or [""])[0]
        whole = isinstance(error, UserError)
        why = str(error) if whole else f"ended with {type(error).__name__}: {line}".rstrip(": ")
        if isinstance(error, KeyboardInterrupt):
            why = "was interrupted"
        return End(self.rank, os.getpid(), socket.gethostname(), why, whole=whole)

    def learned(self, end: End) -> None:
        """In a thread of its own: say it, give the main thread its time, and end the process if that is too long."""
        since = time.monotonic()
        if self._known.is_set():
            return
        child = self.children.get(end.rank)
        if end.lost and child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(1)
                end = replace(end, why=_how(child))
        self._end = end
        self._known.set()
        speaks = self._speaks(end)
        if end.lost and speaks:
            with self._turn:
                self._say(end)
        self._out.wait((GRACE if end.lost else PATIENCE) + (0 if speaks else QUIET))
        with self._turn:
            if not self._out.is_set():
                self._say(end)
                self._finish()
        if end.lost and not self._done:
            time.sleep(max(0.0, LIMIT - (time.monotonic() - since)))
            self._finish()

    def _speaks(self, end: End) -> bool:
        return self.rank == (1 if end.rank == 0 else 0)

    def _say(self, end: End) -> None:
        if not self._said:
            self._said = True
            with contextlib.suppress(OSError, ValueError):  # nobody listens any more
                print(f"\nerror: {self._words(end)}", file=sys.stderr, flush=True)  # below the bar

    def _words(self, end: End) -> str:
        if not self._speaks(end):
            return f"rank {self.rank} ends as well: {end}"
        if end.whole or not self.advice:
            return str(end)
        return f"{end}\nAll ranks end; go on from the last whole checkpoint with\n  {self.advice}"

    def end_children(self, end: End | None = None) -> None:
        """The ranks that this process has started end with it; one that has failed may say what it has met with."""
        if end is not None and end.rank in self.children and not (end.lost or end.whole):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.children[end.rank].wait(GRACE)
        for child in self.children.values():
            child.kill()

    def at_exit(self) -> None:
        """After an error of this rank's own, those it has started end too, by themselves or not."""
        until = time.monotonic() + QUIET / 2  # they are still quiet then
        if self.failed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                for child in self.children.values():
                    child.wait(max(0.0, until - time.monotonic()))
            self.end_children()

    def _finish(self) -> None:
        """There is no way out of a collective but this."""
        self.end_children()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(STATUS)


def _how(child: subprocess.Popen) -> str:
    """In what way a child has ended."""
    if child.returncode >= 0:
        return f"ended with status {child.returncode} before training began; see what it said"
    why = ": from outside, or out of memory?" if child.returncode == -signal.SIGKILL else ""
    return f"was ended by signal {-child.returncode} ({signal.strsignal(-child.returncode)}){why}"


def _of_a_collective(error: BaseException) -> bool:
    """Whether torch says that a connection of the process group has broken."""
    words = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those in whose handling it was raised."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
