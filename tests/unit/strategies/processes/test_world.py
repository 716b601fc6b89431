"""Worlds of ranks for commands: results in order, and what is said of a rank that fails, hangs or dies."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from gan.files.errors import UserError
from strategies.private import default_store
from strategies.processes import world
from strategies.processes.board import Entry, shared_board
from strategies.processes.lost_ranks import STATUS
from strategies.processes.world import WorldFailed, WorldHangs, call


def total(numbers):
    """The number comes out of a worker process of a loader."""
    (number,) = DataLoader(numbers, batch_size=None, num_workers=1)
    mine = torch.tensor(float(dist.get_rank() + number))
    dist.all_reduce(mine)
    return dist.get_rank(), mine.item()


def fails(how):
    """The second rank fails, while the first one waits for it for ever."""
    if dist.get_rank() == 0:
        try:
            dist.barrier()
        finally:
            if how == "ends with the other":
                os._exit(STATUS)
    if how == "dies":
        os._exit(7)
    raise UserError("too many colours;\ntype fewer") if how == "refuses" else RuntimeError("no more\npaint")


def hangs():
    if dist.get_rank() == 1:
        shared_board(2, 0, "", bool).write(1, Entry(1, 0, 3, True, "judge"))
    time.sleep(60)


def waits_in_vain(folder):
    """The second rank waits for a collective that the first one never joins."""
    (Path(folder) / f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    if dist.get_rank() == 1:
        dist.barrier()
    time.sleep(120)


def alive(pid):
    """A process that has ended is a zombie until somebody asks for its status."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def until(condition):
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.slow
def test_ranks_end_when_the_program_is_killed_that_has_started_them(tmp_path):
    code = f"from {__name__} import *; call(waits_in_vain, {str(tmp_path)!r}, ranks=2, limit=100)"
    program = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[4])
    assert until(lambda: len(list(tmp_path.glob("pid-*"))) == 2)
    time.sleep(0.2)  # until they are written, and one waits
    pids = [int(path.read_text()) for path in tmp_path.glob("pid-*")]
    assert all(map(alive, pids))
    program.kill()
    program.wait()
    assert until(lambda: not any(map(alive, pids)))


def test_every_rank_returns_its_result():
    assert call(total, [10], ranks=2, limit=60) == [(0, 21.0), (1, 21.0)]


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("raises", "ended with RuntimeError: no more"),
        ("refuses", "too many colours;\ntype fewer"),
        ("ends with the other", "ended with RuntimeError: no more"),
        ("dies", "ended with status 7; see what it said"),
    ],
)
def test_the_rank_that_failed_first_is_named(how, what, monkeypatch):
    monkeypatch.setattr(world, "GRACE", 2.0)
    with pytest.raises(WorldFailed, match=what) as failed:
        call(fails, how, ranks=2, limit=60)
    failure = failed.value.failure
    assert (failure.rank, failure.why, failure.refused) == (1, what, how == "refuses")
    assert ("no more\npaint" in failure.traceback) == ("RuntimeError" in what)


def test_a_world_that_hangs_is_ended_and_says_where_its_ranks_were(monkeypatch):
    ended, end = [], world._end
    monkeypatch.setattr(world, "_end", lambda process: (end(process), ended.append(process)))
    with pytest.raises(WorldHangs, match="no end within 3 s") as hanging:
        call(hangs, ranks=2, limit=3)
    assert hanging.value.places == {1: "plays phase 'judge' of step 3"}
    assert len(ended) == 2 and not any(process.is_alive() for process in ended)


def asks_the_store_late():
    """As a rank does that is still connecting when the first one has returned."""
    if dist.get_rank() == 1:
        time.sleep(1)
        default_store().add("late", 1)


def test_what_the_first_rank_serves_is_there_until_all_have_returned():
    assert call(asks_the_store_late, ranks=2, limit=60) == [None, None]
