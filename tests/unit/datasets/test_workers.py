"""Workers of loaders that die or hang: one line says which and what to type, and nothing waits for them."""

import errno
import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch

from datasets import GlobalBatches, GlobalLoader, GlobalStream, ResumableLoader
from datasets import workers as processes
from datasets.augment import Prepared
from datasets.files import cache
from datasets.workers import workers_explained
from gan.app.scoring.scoring import turns_of
from gan.files.errors import UserError, WorkerLost
from gan.files.system import signals
from strategies.world import World
from tests.support.numbers import Numbers
from tests.support.posix import not_on_windows, only_on_linux

ROOM = "the loader's workers have no shared memory left, .*; type --workers 0, or give it more: docker run --shm-size"


class Faulty(Numbers):
    def __init__(self, fault):
        super().__init__(4)
        self.fault = fault

    def __getitem__(self, index):
        if index == 1:
            self.fault()
        return torch.tensor(index)

    def __iter__(self):  # as a stream
        return map(self.__getitem__, range(4))


@pytest.fixture
def no_worker_left_behind():
    """torch would wait ten seconds for one that hangs, in a later test."""
    there = multiprocessing.active_children()
    yield
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error in the main thread
    for child in set(multiprocessing.active_children()) - set(there):
        child.kill()
        child.join()
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.promise(
    "a loader's worker is killed, hangs, or has no shared memory",
    "one line that says what to type; the program ends in time",
)
@only_on_linux
@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("SIGKILL", WorkerLost, r"process \d+ was ended by signal: Killed \(out of memory, .*\); try fewer --workers$"),
        ("SIGBUS", UserError, ROOM),
    ],
)
def test_a_worker_that_dies_is_an_error_of_one_line(name, kind, message):
    """Also after a fit of Lightning, which puts back the signal handlers that it has found."""
    (number,) = signals(name)
    list(GlobalLoader(Numbers(4), 2, workers=1))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with pytest.raises(UserError, match=message) as error, workers_explained():
        list(GlobalLoader(Faulty(lambda: os.kill(os.getpid(), number)), 2, shuffle=False, workers=1))
    assert type(error.value) is kind and "\n" not in str(error.value)


class Local(Faulty):
    """Cannot be pickled, as many a person's data set."""

    def __init__(self):
        super().__init__(int)
        self.nothing = lambda: None


READS = {
    "training": lambda data: GlobalLoader(data, 2, workers=1),
    "stream": lambda data: GlobalStream(data, 2, workers=1),
    "scoring": lambda data: turns_of(data, 4, 2, World(), 1),
    "preparing": lambda data: cache._results(lambda entry: data[entry % 4], np.arange(cache.FEW + 1), "files"),
}


@pytest.mark.parametrize("read", READS)
@only_on_linux
def test_workers_need_no_pickling_where_python_takes_a_server_to_start_processes(read):
    """Python 3.14 does under Linux."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("forkserver", force=True)
    try:
        assert len(list(READS[read](Local()))) > 1
    finally:
        multiprocessing.set_start_method(before, force=True)


@pytest.mark.promise("a loader's worker is killed, hangs, or has no shared memory")
@not_on_windows
@pytest.mark.parametrize("read", READS)
def test_a_worker_that_hangs_is_named(read, tmp_path, monkeypatch, no_worker_left_behind):
    monkeypatch.setattr(processes, "PATIENCE", 1.0)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    message = r"given no batch for 1 s: a disk or a network folder .* --workers 0"
    with pytest.raises(WorkerLost, match=message), workers_explained():
        list(READS[read](Faulty(pipe.read_bytes)))


def test_what_has_nothing_to_do_with_workers_stays_as_it_is():
    full = errno.ENOSPC, "No space left on device"
    for error in (RuntimeError("mat1 and mat2"), OSError(*full, "a.png"), OSError(*full)):
        with pytest.raises(type(error)) as raised, workers_explained():
            raise error
        assert raised.value is error


@pytest.mark.promise("a loader's worker is killed, hangs, or has no shared memory")
@not_on_windows
def test_a_program_ends_though_a_worker_leaves_signals_to_the_trainer(monkeypatch):
    """multiprocessing asks it by SIGTERM to end, and waits for it."""
    monkeypatch.setattr(processes, "FAREWELL", 0.1)
    handler = signal.getsignal(signal.SIGCHLD)
    loader = ResumableLoader(Prepared(Numbers(8)), GlobalBatches(8, 2), workers=1)
    there = set(multiprocessing.active_children())
    iterator = iter(loader)
    next(iterator)
    (worker,) = set(multiprocessing.active_children()) - there
    monkeypatch.setattr(processes, "active_children", lambda: [worker])
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(0.1)
    assert worker.is_alive()
    try:
        processes._end_workers()
        worker.join(10)
        assert not worker.is_alive()
    finally:
        worker.kill()
        signal.signal(signal.SIGCHLD, handler)
