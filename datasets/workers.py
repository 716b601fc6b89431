"""The worker processes of loaders: how many, what they do at signals, and what is said when one of them fails."""

import atexit
import errno
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import active_children, get_start_method
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from gan.files.errors import UserError, WorkerLost
from gan.files.system import cores, signals

PATIENCE = 600.0  # seconds in which workers must give a batch; less than ranks wait for each other
MOST = 4  # workers of a rank, where nobody says how many
FAREWELL = 1.0  # seconds that they have to end when the program ends
Begin = Callable[[int], Any] | None  # the author's worker_init_fn
# Inside its `with`, a stream gives all its samples: by get_worker_info() many would give each worker a part.
as_in_no_worker = partial(mock.patch.object, torch.utils.data._utils.worker, "_worker_info", None)

_NO_ROOM = re.compile(r"Bus error|unable to allocate shared memory|unable to mmap|unable to open shared memory")
_LOST = re.compile(r"DataLoader worker \(pid\(?s?\)? ([\d, ]+)\) (?:is killed by signal: (\w+)|exited)")
_STUCK = re.compile(r"DataLoader timed out after (\d+)")


def usual(ranks: int) -> int:
    """The workers of a rank, where nobody says how many. The `ranks` of this host share its CPUs."""
    return max(1, min(MOST, cores() // ranks))


def _start_method(workers: int) -> str | None:
    """How a loader starts its workers: None is the program's own way.

    Since Python 3.14 a server starts them under Linux: a data set would have to be pickled, so could hold no lambda,
    each worker would import torch again, and no rank would hear of its death. So they are forked, as before.
    """
    return "fork" if workers and get_start_method() == "forkserver" else None


class Loader(DataLoader):
    """A DataLoader whose workers leave signals to the trainer, and whose dead or silent workers are noticed.

    It draws from a generator of its own: torch's would draw from the global one.
    """

    def __init__(self, *args: Any, seed: int, workers: int, worker_init_fn: Begin = None, **settings: Any) -> None:
        super().__init__(
            *args,
            num_workers=workers,
            multiprocessing_context=_start_method(workers),
            timeout=PATIENCE if workers else 0,
            worker_init_fn=partial(_begin, worker_init_fn),
            generator=torch.Generator().manual_seed(seed),
            **settings,
        )

    def __iter__(self) -> Iterator[Any]:
        # torch shall raise an error when a worker dies. Lightning's fit takes torch's signal handler away at its end.
        for number in signals("SIGCHLD") if self.num_workers else ():
            if getattr(signal.getsignal(number), "__module__", None) != signal_handling.__name__:
                signal_handling._SIGCHLD_handler_set = False
                signal_handling._set_SIGCHLD_handler()
        return super().__iter__()


def _begin(then: Begin, worker: int) -> None:
    """Ctrl-C reaches all processes of a terminal. A worker that ends would make the current step fail."""
    for number in signals("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGBREAK"):
        signal.signal(number, signal.SIG_IGN)
    if then is not None:
        then(worker)


@atexit.register
def _end_workers() -> None:
    """End the workers that are left. multiprocessing would wait for ever for one that leaves signals to the trainer."""
    for number in signals("SIGCHLD"):
        signal.signal(number, signal.SIG_DFL)  # torch's handler raises an error for a worker that is killed
    until = time.monotonic() + FAREWELL
    children = [child for child in active_children() if child.daemon]
    for child in children:
        child.terminate()
    for child in children:
        child.join(max(0.0, until - time.monotonic()))
        child.kill()


@contextmanager
def workers_explained() -> Iterator[None]:
    """Inside the `with`, a failure of workers is an error of one line: torch's own is a stack of two processes.

    A worker may die at any time, and torch raises its error wherever the main thread is just then.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        explanation = _explanation(error)
        if explanation is None:
            raise
        raise explanation from error


def _explanation(error: Exception) -> UserError | None:
    text = f"{error.__cause__} {error}"  # torch has the signal in the first of the two, or has only the second
    # multiprocessing raises it when it makes a lock, which needs shared memory too.
    semaphore = isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None
    frames = (frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__))
    if _NO_ROOM.search(text) or (semaphore and "multiprocessing.synchronize" in frames):
        return UserError(
            "the loader's workers have no shared memory left, through which they hand batches over (df -h /dev/shm); "
            "type --workers 0, or give it more: docker run --shm-size 8g, mount -o remount,size=8g /dev/shm"
        )
    if lost := _LOST.search(text):
        how = f"was ended by signal: {lost[2]}" if lost[2] else "has ended"
        why = " (out of memory, or from outside?)" if lost[2] == "Killed" else ""
        return WorkerLost(f"a lost worker of a loader: process {lost[1]} {how}{why}; try fewer --workers")
    if stuck := _STUCK.search(text):
        return WorkerLost(
            f"a loader whose workers have given no batch for {stuck[1]} s: a disk or a network folder that does not "
            f"answer? Read the files by hand, or type --workers 0 to see where reading waits"
        )
    return None
