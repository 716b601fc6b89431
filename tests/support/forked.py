"""`python -m tests.support.forked MODULE WORDS`: `python -m MODULE WORDS` as a fork of the server that runs already.

Slurm starts this process, which imports nothing. It hands its signals on to the fork, and ends with the fork's status.
"""

import os
import signal
import sys
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.reduction import DupFd
from typing import Any

SERVER = "TESTS_FORKSERVER"  # the variable with key and address of a server that runs


class Files:
    """Open files that go along to the other process."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __reduce__(self) -> tuple[Any, ...]:
        return _open, tuple(map(DupFd, self.numbers))


def _open(*passed: Any) -> list[int]:
    return [each.detach() for each in passed]


def named() -> str:
    """The value of that variable, for the server of this process."""
    ours = forkserver._forkserver
    return f"{getattr(ours, '_forkserver_authkey', b'').hex()}:{ours._forkserver_address}"  # a key since Python 3.14


def join() -> None:
    """From now on this process takes the server that the variable names."""
    ours, (key, _, address) = forkserver._forkserver, os.environ[SERVER].partition(":")
    ours._forkserver_authkey = bytes.fromhex(key)  # a fork of the server knows its address alone
    if ours._forkserver_address is None:
        ours._forkserver_address, ours._forkserver_alive_fd = address, os.open(os.devnull, os.O_WRONLY)
    forkserver.ensure_running = ours.ensure_running = resource_tracker.ensure_running


def begin(*typed: Any) -> None:
    from tests.support import commands  # which is imported in the fork

    commands.begin(*typed)


if __name__ == "__main__":
    from tests.support import forked  # as the fork calls it

    forked.join()
    given = sys.argv[1:], os.getcwd(), dict(os.environ), False, forked.Files(1, 2, os.open(os.devnull, os.O_WRONLY))
    process = get_context("forkserver").Process(target=forked.begin, args=given)
    process.start()
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(process.pid, number))
    process.join()
    sys.exit(process.exitcode)
