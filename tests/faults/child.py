"""A command in a forked process: as in a shell, without the seconds in which torch is imported."""

import ctypes
import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gan.app import outputs

LIMIT = 60.0  # seconds after which a command is said to hang
LEFT = 5.0  # seconds that its processes have to end after it
MEMORY = 3 << 30  # bytes of addresses that a command may ask for beyond those that it begins with
Main = Callable[[list[str]], int]


@dataclass(frozen=True)
class Ended:
    """How a command has ended. `hung` has its stacks if it did not, and `left` the processes that outlived it."""

    status: int  # that of a signal is negative
    out: str
    err: str
    seconds: float
    hung: str = ""
    left: tuple[str, ...] = ()

    @property
    def said(self) -> str:
        return self.out + self.err


def adopt() -> None:
    """Become the parent of all processes that this one's children leave behind. So none escapes `wait`."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


def end_with_parent() -> None:
    """Let this process be killed when the one that has started it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class Running:
    """A command that runs in `folder`; what it says goes to the folder `beside`."""

    def __init__(self, main: Main, words: Sequence[str], folder: Path, beside: Path, limit: float = LIMIT) -> None:
        beside.mkdir(exist_ok=True)
        self.beside, self.limit, self.began = beside, limit, time.monotonic()
        self.process = os.fork()
        if self.process == 0:
            try:
                _be(main, list(words), folder, beside, limit)
            except BaseException:  # noqa: BLE001 - ours, and nobody else would hear of it
                traceback.print_exc()
            finally:
                os._exit(70)

    def runs(self) -> bool:
        return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def wait(self) -> Ended:
        """Wait until it ends, at most until its limit, and end whatever it has left."""
        while self.runs() and time.monotonic() < self.began + self.limit:
            time.sleep(0.01)
        hung = ""
        if self.runs():
            hung = (self.beside / "stacks").read_text() or "it says not where"
            os.kill(self.process, signal.SIGKILL)
        seconds = time.monotonic() - self.began
        status = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        until = time.monotonic() + LEFT
        while (left := _children()) and not hung and time.monotonic() < until:
            time.sleep(0.02)
        names = tuple(f"process {process}: {_name(process)}" for process in left)
        while left := _children():
            for process in left:
                os.kill(process, signal.SIGKILL)
            time.sleep(0.01)
        out, err = ((self.beside / name).read_text(errors="backslashreplace") for name in ("out", "err"))
        return Ended(status, out, err, seconds, hung, () if hung else names)


def _children() -> list[int]:
    """This process's children, without those that have ended."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    left = []
    for process in map(int, found):
        if os.waitpid(process, os.WNOHANG)[0] == 0:
            left.append(process)
    return left


def _name(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "?"


def _be(main: Main, words: list[str], folder: Path, beside: Path, limit: float) -> None:
    end_with_parent()
    os.setsid()
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(beside / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8")
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    sys.argv = ["gan", *words]
    os.environ.update(PATH="/nowhere", GAN_CACHE="")  # no job is submitted, and nothing else is started
    tempfile.tempdir = str(beside.parent)
    faulthandler.dump_traceback_later(max(1, limit - 2), file=(beside / "stacks").open("w"))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_addresses() + MEMORY,) * 2)
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork  # a server to fork from would import everything again
    try:
        status = main(words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - as Python does at the end of a program
        traceback.print_exc()
        status = 1
    outputs.end(status)


def _addresses() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
