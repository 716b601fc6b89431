"""Only one process trains a run."""

import errno
import multiprocessing
import os
import socket
import time

import pytest

from gan.app.run import folder
from gan.app.run.folder import RunFolder
from gan.files.errors import UserError
from gan.files.system import fcntl
from tests.support.posix import not_on_windows

fork = None if fcntl is None else multiprocessing.get_context("fork")


def trains(run, here):
    with folder.training(run):
        here.set()
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    """Another process, which trains the run."""
    if fork is None:
        pytest.skip("Windows forks no process")
    here = fork.Event()
    process = fork.Process(target=trains, args=(RunFolder(tmp_path), here))
    process.start()
    assert here.wait(60)
    yield process
    process.kill()
    process.join()


def test_a_run_that_another_process_trains_is_refused_by_name_until_that_is_killed(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE", 0.2)
    said = rf"^process {holder.pid} on {socket.gethostname()} is training '{tmp_path}'; end it first, or resume a copy"
    with pytest.raises(UserError, match=said), folder.training(RunFolder(tmp_path)):
        pass
    holder.kill()
    holder.join()
    with folder.training(RunFolder(tmp_path)):
        assert (tmp_path / "run.lock").read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    assert (tmp_path / "run.lock").read_text() == ""


def test_so_is_one_that_this_process_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "PATIENCE", 0.2)
    run = RunFolder(tmp_path)
    with folder.training(run), pytest.raises(UserError, match=f"process {os.getpid()} on .* is training"):
        folder.training(run).__enter__()
    with folder.training(run):
        pass


def test_one_that_is_just_ending_is_waited_for(holder, tmp_path):
    holder.terminate()
    since = time.monotonic()
    with folder.training(RunFolder(tmp_path)):
        assert time.monotonic() - since < folder.PATIENCE


def stays(here):
    here.set()
    time.sleep(60)


@not_on_windows
def test_a_loaders_worker_does_not_keep_it(tmp_path):
    here = fork.Event()
    worker = fork.Process(target=stays, args=(here,))
    with folder.training(RunFolder(tmp_path)):
        worker.start()
        assert here.wait(60)
    try:
        handle = os.open(tmp_path / "run.lock", os.O_RDWR)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError if somebody has it
        os.close(handle)
    finally:
        worker.kill()
        worker.join()


@not_on_windows
def test_a_file_system_without_locks_is_none_to_wait_for(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with folder.training(RunFolder(tmp_path)), folder.training(RunFolder(tmp_path)):
        pass


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "run.lock").mkdir()
    words = r"^cannot write to '.*': (Is a directory|Permission denied); resume a copy of the folder"
    with pytest.raises(UserError, match=words), folder.training(RunFolder(tmp_path)):
        pass
