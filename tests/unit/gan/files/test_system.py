"""What systems differ in. The systems themselves are rehearsed in tests/system/test_systems.py."""

import os
import signal
import types

import pytest

from gan.files import system
from gan.files.errors import UserError
from gan.files.system import check_ranks, free_memory, lock, signals
from tests.support.posix import only_on_linux


def test_several_ranks_are_refused_where_they_cannot_be_connected(monkeypatch):
    monkeypatch.setattr(system, "LINUX", True)
    monkeypatch.setattr(system, "WINDOWS", False)
    check_ranks(8, hosts=2)
    monkeypatch.setattr(system, "LINUX", False)
    check_ranks(8)
    with pytest.raises(UserError, match=r"^2 hosts are connected under Linux only; type --nodes 1 or"):
        check_ranks(8, hosts=2)
    monkeypatch.setattr(system, "WINDOWS", True)
    check_ranks(1)
    with pytest.raises(UserError, match=r"^8 devices are trained by processes that need .*; type --devices 1 or"):
        check_ranks(8)


def test_signals_that_the_system_lacks_are_left_out():
    assert signals("SIGINT", "SIGNOT") == (signal.SIGINT,)


@only_on_linux
def test_memory_that_the_system_does_not_say_is_no_limit(monkeypatch):
    assert 0 < free_memory() < float("inf")
    monkeypatch.setattr(system, "LINUX", False)
    assert 0 < free_memory() < float("inf")
    monkeypatch.delattr(os, "sysconf", raising=False)
    assert free_memory() == float("inf")


def test_windows_locks_what_lies_behind_the_text(tmp_path, monkeypatch):
    locked = []

    def locking(handle, mode, count):
        if locked:
            raise PermissionError(13, "Permission denied")
        locked.append((os.lseek(handle, 0, os.SEEK_CUR), mode, count))

    monkeypatch.setattr(system, "fcntl", None)
    monkeypatch.setattr(system, "msvcrt", types.SimpleNamespace(locking=locking, LK_NBLCK=2), raising=False)
    with (tmp_path / "x").open("w+b") as file:
        lock(file.fileno())
        with pytest.raises(BlockingIOError, match="Permission denied"):
            lock(file.fileno())
    assert locked == [(2**30, 2, 1)]
    with pytest.raises(OSError, match="Bad file descriptor"):
        lock(-1)
