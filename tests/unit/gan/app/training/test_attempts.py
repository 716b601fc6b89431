"""The attempts of a person's torchrun, which tells its ranks only how often it has started them."""

import os
from pathlib import Path
from unittest import mock

import pytest

from gan.app.training import start
from gan.files.errors import UserError
from strategies.processes.board import NEVER, VARIABLE, Board, Entry
from strategies.processes.launchers import Launched
from tests.support.posix import not_on_windows


def place(by="torchrun"):
    return Launched(by, 0, 0, 2, 2, 0)


@pytest.fixture
def attempt(tmp_path, monkeypatch):
    """`attempt(number, ends)`: torchrun's attempt of this number ends in the steps that its two ranks have begun."""
    monkeypatch.delenv("GAN_AGENT", raising=False)
    monkeypatch.delenv(VARIABLE, raising=False)

    def run(number, *ends):
        variables = {
            "TORCHELASTIC_ERROR_FILE": str(tmp_path / "none_xyz" / f"attempt_{number}" / "0" / "error.json"),
            "TORCHELASTIC_RESTART_COUNT": str(number),
        }
        (tmp_path / "none_xyz").mkdir(exist_ok=True)
        with mock.patch.dict("os.environ", variables):
            start.note_steps(place())
            start.check(place())
            for rank, step in enumerate(ends):
                Board(Path(os.environ[VARIABLE]), 2).write(rank, Entry(step=step))

    return run


@not_on_windows
def test_the_third_failure_at_one_step_is_the_last_one_however_often_torchrun_tries(attempt):
    for number in range(3):
        attempt(number, 5, 4)  # the other rank was a step behind
    for number in (3, 4, 5):
        with pytest.raises(UserError, match="the last 3 attempts have failed at step 5, so the ranks are not started"):
            attempt(number)


def test_failures_before_the_first_step_count_as_well(attempt):
    for number in range(3):
        attempt(number)
    with pytest.raises(UserError, match="failed before the first step"):
        attempt(3)


@not_on_windows
def test_the_control_failures_at_other_steps_do_not(attempt):
    for number in range(8):
        attempt(number, 5 + number // 2, NEVER)


@not_on_windows
def test_hosts_that_come_and_go_are_no_failures(attempt):
    for _ in range(5):
        attempt(0, 5, 5)
    for step in (5, 7, 5):
        attempt(1, step, step)
    attempt(2, 5, 5)
    with pytest.raises(UserError, match="at step 5"):
        attempt(3)


@pytest.mark.parametrize("by", [None, "slurm", "mpi"])
def test_other_launchers_do_not_try_again(by, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "a" / "b" / "c" / "error.json"))
    there = None if by is None else place(by)
    start.note_steps(there)
    start.check(there)
    assert list(tmp_path.iterdir()) == []


def test_our_own_agent_counts_for_itself(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "/x/y/z/error.json")
    assert start.folder(place()) is not None
    monkeypatch.setenv("GAN_AGENT", "agent host /tmp/gan-agent-x")
    assert start.folder(place()) is None
