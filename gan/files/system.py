"""What operating systems differ in. One device needs nothing of POSIX; several need Linux, or on one host macOS."""

import math
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from threading import Timer
from typing import Any

from gan.files.errors import UserError

if sys.platform == "win32":
    import msvcrt

    fcntl = resource = None
else:
    import fcntl
    import resource  # noqa: F401 - others import it from here

LINUX, WINDOWS = sys.platform == "linux", sys.platform == "win32"
FAR = 2**30  # where a file is locked on Windows: no other process could read the bytes, and a file begins with text


def lock(handle: int, shared: bool = False) -> None:
    """Lock an open file or folder. BlockingIOError if another process has it, OSError where there are no locks."""
    if fcntl is not None:
        return fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.lseek(handle, FAR, os.SEEK_SET)
    try:
        return msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # pyrefly: ignore[unknown-name] - it is imported under Windows
    except PermissionError as error:
        raise BlockingIOError(*error.args) from error


def quoted(*words: object) -> str:
    """These words as a person types them in a shell: a folder with a space in its name is quoted."""
    return (subprocess.list2cmdline if WINDOWS else shlex.join)([str(word) for word in words])


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """Those of these signals that the system has."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))


def after_fork(deed: Callable[[], None]) -> None:
    """Do it in every process that is forked from now on. Windows forks none."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=deed)


@contextmanager
def unless_within(seconds: float, deed: Callable[..., object], *args: Any) -> Iterator[None]:
    """Do it in a thread, if what is inside the `with` takes longer than so many seconds."""
    timer = Timer(seconds, deed, args)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cores() -> int:
    """The CPUs that this process may use: a job of Slurm or a container has a part of its machine."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_proc(file: str, name: str) -> int:
    """Bytes, by a line of a file of Linux such as `VmRSS:  2220 kB`."""
    with open(f"/proc/{file}") as lines:
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


def free_memory() -> float:
    """The bytes that are free on this machine. macOS says only how many there are, and Windows is not asked."""
    if LINUX:
        return in_proc("meminfo", "MemAvailable")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else math.inf


def check_ranks(ranks: int, hosts: int = 1) -> None:
    """Refuse several ranks where the system cannot start or connect them."""
    if WINDOWS and ranks > 1:
        raise UserError(
            f"{ranks} devices are trained by processes that need Linux or macOS; type --devices 1 or "
            f"Trainer(devices=1), or take Linux in Windows (WSL 2)"
        )
    if hosts > 1 and not LINUX:
        raise UserError(f"{hosts} hosts are connected under Linux only; type --nodes 1 or Trainer(num_nodes=1)")
