"""How a command ends."""

import atexit
import contextlib
import multiprocessing.util
import os
import signal
import sys
import threading
from typing import NoReturn

PATIENCE = 3.0  # seconds that a daemon process has to end, and again after it was killed


def end(status: int) -> NoReturn:
    """End the process as sys.exit does: after other threads, and what is registered with atexit.

    sys.exit would then take all objects of torch and Lightning apart, which is a third of a short command's time. And
    it would wait without limit for daemon processes that do not end, such as a loader's worker that waits for a disk.
    """
    threading._shutdown()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when a worker dies; they may now
    atexit.unregister(multiprocessing.util._exit_function)
    atexit._run_exitfuncs()
    _end_processes()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads any more
            stream.flush()
    os._exit(status)


def _end_processes() -> None:
    """Do what multiprocessing does at exit: ask daemon processes to end, and wait for all. Kill those that stay."""
    ending = threading.Thread(target=multiprocessing.util._exit_function, daemon=True)
    ending.start()
    ending.join(PATIENCE)
    while ending.is_alive() and not all(child.daemon for child in multiprocessing.active_children()):
        ending.join(PATIENCE)  # a process that is no daemon may take its time
    if not ending.is_alive():
        return
    for child in multiprocessing.active_children():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(f"process {child.pid} ({child.name}) does not end, so it is killed", file=sys.stderr, flush=True)
        child.kill()
    ending.join(PATIENCE)
