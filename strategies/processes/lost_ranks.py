"""What a rank does when another rank ends unexpectedly: one message names that rank and the reason, and all end.

    a rank is killed, or its host is unreachable    the message names it at once
    a rank ends with an error of its own            the message is that error: a UserError's text, or the error's name
    all ranks raise the same error together         no message (the error's `agreed` is true)

Rank 0 prints the message; about rank 0, rank 1 prints it. The other ranks wait quietly, and are usually ended
meanwhile. The main thread of a survivor waits in a collective for the rank that will not come. gloo may raise an error
at once; NCCL usually does not return. If the main thread raises within some seconds, its error is replaced by one that
names the rank. If it does not, the process is ended, because there is no other way out of a collective. Without the
lost rank the process group cannot be used any more. So a survivor ends after LIMIT at the latest, whatever its program
does.
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
from strategies.processes import agent
from strategies.processes.lifeline import GONE, End, Lifeline

GRACE = 5.0  # seconds for the main thread to leave training by itself, after a rank was lost
PATIENCE = 10.0  # the same after a rank has raised an error: all may be about to raise the same one
QUIET = 3.0  # additional seconds for ranks that do not print
LIMIT = 20.0  # seconds after which a survivor of a lost rank has ended
LOOK = 0.25  # seconds between two checks of parent and children, until the lifeline is connected
STATUS = 2  # the exit status of a command that failed


class Survivor:
    """Watches over one rank, from its launch until it leaves training.

    `children` are the processes that this one has started, by rank. They end with it. `parent` is the rank that has
    started this one, and its process id. Until the lifeline is connected, parents and children watch each other.
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
        self.beside: Callable[[int], str] = lambda lost: ""  # where a lost rank was in the game, and where this one is
        self.settle: Callable[[], None] = lambda: None  # finishes what the ranks still do together
        self.failed = False
        self._end: End | None = None
        self._known, self._tied, self._out = threading.Event(), threading.Event(), threading.Event()
        self._done = False
        self._said = False
        self._turn = threading.Lock()  # so that either the main thread prints the message or the thread of `learned`
        if self.children or self.parent:
            threading.Thread(target=self._look_after_family, name="lifeline-family", daemon=True).start()

    # ---- beginning ----

    def _look_after_family(self) -> None:
        """Watch parent and children. Lightning's own check ends all ranks with SIGKILL and names none."""
        while not (self._out.is_set() or self._tied.wait(LOOK)):
            for rank, child in self.children.items():
                if child.poll() is not None:
                    lost = child.returncode < 0
                    return self.learned(End(rank, child.pid, socket.gethostname(), _how(child), lost=lost))
            if self.parent is not None and os.getppid() != self.parent[1]:
                return self.learned(End(*self.parent, socket.gethostname(), GONE, lost=True))
        return None

    def tie(self, host: str, advice: str, broadcast: Callable[[Any], Any], gather: Callable[[Any], list[Any]]) -> None:
        """Connect to rank 0 at `host`. All ranks call it together, after the process group exists."""
        address, self.advice = broadcast((self.lifeline.listen([host]), advice) if self.rank == 0 else None)
        problems = gather(self.lifeline.join(address) if self.rank else None)
        if any(problems):
            self.lifeline.leave()
            rank, problem = next((rank, problem) for rank, problem in enumerate(problems) if problem)
            rank_zero_warn(
                f"rank {rank} cannot reach rank 0 ({problem}), so if a rank is lost the others will notice only "
                f"after torch's time limit; allow the hosts to connect to each other on all ports"
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
            result = function(*args, **kwargs)
            self._done = True
            return result
        except BaseException as error:
            self.settle()
            named = self._named(error)
            if named is None:
                raise
            raise named from error
        finally:
            with self._turn:
                self._out.set()
            self.lifeline.leave()

    def _named(self, error: BaseException) -> RankLost | None:
        """The error that names the rank that caused this error; None if the error is this rank's own."""
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
        with self._turn:  # from here on only the main thread prints
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
        """Called in a thread of its own when a rank has ended.

        Prints the message, waits for the main thread to leave training, and ends the process if that takes too long.
        """
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
            if agent.speaks():
                return
            with contextlib.suppress(OSError, ValueError):  # stderr may be closed
                print(f"\nerror: {self._words(end)}", file=sys.stderr, flush=True)  # below the progress bar

    def _words(self, end: End) -> str:
        if not self._speaks(end):
            return f"rank {self.rank} ends as well: {end}"
        places = self.beside(end.rank) if end.lost else ""
        said = f"{end}; {places}" if places else str(end)
        return said if end.whole else said + self._go_on()

    def _go_on(self) -> str:
        if not self.advice:
            return ""
        return f"\nAll ranks end; go on from the last whole checkpoint with\n  {self.advice}"

    def end(self, why: str) -> None:
        """End this process, whose main thread waits in vain. The other ranks end too. Called in another thread."""
        end = End(self.rank, os.getpid(), socket.gethostname(), why + self._go_on(), whole=True)
        with self._turn:
            if self._out.is_set() or self._known.is_set():
                return
            if self.rank == 0:
                print(f"\nerror: {end}", file=sys.stderr, flush=True)
            self.lifeline.leave(end)
            self._finish()

    def end_children(self, end: End | None = None) -> None:
        """Kill the ranks that this process started. If one of them failed itself, it gets time to print its error."""
        if end is not None and end.rank in self.children and not (end.lost or end.whole):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.children[end.rank].wait(GRACE)
        for child in self.children.values():
            child.kill()

    def at_exit(self) -> None:
        """After an error of this rank, wait for the ranks that it started, and kill those that do not end."""
        until = time.monotonic() + QUIET / 2  # before they print anything
        if self.failed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                for child in self.children.values():
                    child.wait(max(0.0, until - time.monotonic()))
            self.end_children()

    def _finish(self) -> None:
        """End this process and its children at once: there is no other way out of a collective."""
        self.end_children()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(STATUS)


def _how(child: subprocess.Popen) -> str:
    """How a child process has ended, as text."""
    if child.returncode >= 0:
        return f"ended with status {child.returncode} before training began; see what it said"
    why = ": from outside, or out of memory?" if child.returncode == -signal.SIGKILL else ""
    return f"was ended by signal {-child.returncode} ({signal.strsignal(-child.returncode)}){why}"


def _of_a_collective(error: BaseException) -> bool:
    """Whether this is torch's error for a broken connection of the process group."""
    words = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe")
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error, its cause, the cause of that, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
