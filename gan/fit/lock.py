"""Only one process at a time trains a run. Two would write the same files, and remove each other's checkpoints.

The first rank locks the file `run.lock` in the run's folder while it trains, and writes into it who it is. The system
ends the lock with the process, however that ends. Who only reads the run does not ask for it.
"""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from gan.errors import UserError
from gan.files import lockable
from gan.fit.folder import RunFolder

PATIENCE = 10.0  # seconds: a launcher may start ranks again while the first one of the attempt before is just ending
LOOK = 0.1  # seconds between two tries


@contextmanager
def training(folder: RunFolder) -> Iterator[None]:
    """Hold the run's lock inside the `with`. Refuse, by name, if another process trains this run."""
    with ExitStack() as stack:
        try:
            handle = stack.enter_context(lockable(folder.lock, os.O_RDWR | os.O_CREAT))
        except OSError as error:
            raise UserError(
                f"cannot write to '{folder.path}': {error.strerror}; resume a copy of the folder, where you may write"
            ) from error
        _lock(handle, folder)
        _note(handle, f"process {os.getpid()} on {socket.gethostname()}\n")
        stack.callback(_note, handle, "")
        yield


def _lock(handle: int, folder: RunFolder) -> None:
    until, said = time.monotonic() + PATIENCE, False
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(handle, 1000, 0).decode(errors="replace").strip() or "another process"
            if not said:
                said = True
                print(f"{who} is training '{folder.path}'; waiting {PATIENCE:g} s for its end ...", flush=True)
            if time.monotonic() > until:
                raise UserError(
                    f"{who} is training '{folder.path}'; end it first, or resume a copy of the folder"
                ) from None
            time.sleep(LOOK)
        except OSError:  # a file system without locks
            return None


def _note(handle: int, text: str) -> None:
    with suppress(OSError):  # the disk may be full
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)
