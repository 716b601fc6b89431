"""Worlds of ranks, and freed memory that stays."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.private import default_store
from strategies.processes import call_on_ranks, heap
from strategies.processes.board import Entry, shared_board
from strategies.processes.call_on_ranks import WorldFailed, WorldHangs, call
from strategies.processes.lost_ranks import STATUS
from tests.support.commands import alive, until
from tests.support.duel import Duel
from tests.support.parity import parts, trainer
from tests.support.posix import only_on_linux

# ---- world ----


def total(numbers):
    """The number comes out of a worker process of a loader."""
    (number,) = DataLoader(numbers, batch_size=None, num_workers=1, multiprocessing_context="fork")
    mine = torch.tensor(float(dist.get_rank() + number))
    dist.all_reduce(mine)
    if dist.get_rank() == 1:
        time.sleep(0.3)
        default_store().add("late", 1)  # which the first rank serves, and has returned
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
        ("refuses", "too many colours;\ntype fewer"),
        ("ends with the other", "ended with RuntimeError: no more"),
        ("dies", "ended with status 7; see what it said"),
    ],
)
def test_the_rank_that_failed_first_is_named(how, what, monkeypatch):
    monkeypatch.setattr(call_on_ranks, "GRACE", 2.0)
    with pytest.raises(WorldFailed, match=what) as failed:
        call(fails, how, ranks=2, limit=60)
    failure = failed.value.failure
    assert (failure.rank, failure.why, failure.refused) == (1, what, how == "refuses")
    assert ("no more\npaint" in failure.traceback) == ("RuntimeError" in what)


def test_a_world_that_hangs_is_ended_and_says_where_its_ranks_were(monkeypatch):
    ended, end = [], call_on_ranks._end
    monkeypatch.setattr(call_on_ranks, "_end", lambda process: (end(process), ended.append(process)))
    wait = call_on_ranks._wait

    def once_noted(folder, processes, limit, board):
        assert until(lambda: board.read()[1].step == 3)  # starting the ranks takes long on a busy machine
        return wait(folder, processes, limit, board)

    monkeypatch.setattr(call_on_ranks, "_wait", once_noted)
    with pytest.raises(WorldHangs, match=r"no end within 0\.1 s") as hanging:
        call(hangs, ranks=2, limit=0.1)
    assert hanging.value.places == {1: "plays phase 'judge' of step 3"}
    assert len(ended) == 2 and not any(process.is_alive() for process in ended)


# ---- heap ----


LARGE = 64 * 2**20
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES")
SCRIPT = """
import ctypes, json, pathlib, runpy, sys
heap, large = runpy.run_path(sys.argv[1]), int(sys.argv[2])
c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]

def resident():
    (line,) = (line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024

def take_and_free():
    memory = c.malloc(large)
    ctypes.memset(memory, 1, large)
    c.free(memory)
    return resident() - before

before = resident()
found = {"at first": take_and_free(), "kept": heap["keep_freed_memory"]()}
found["after one"], found["after two"] = take_and_free(), take_and_free()
heap["give_freed_memory_back"]()
found["given back"] = resident() - before
print(json.dumps(found))
"""


@only_on_linux
@pytest.mark.parametrize(
    ("variables", "kept"),
    [
        ({}, True),
        ({"GLIBC_TUNABLES": "glibc.pthread.rseq=0"}, True),  # no choice of memory
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_max=9"}, False),
        ({"MALLOC_ARENA_MAX": "1"}, False),
    ],
)
def test_what_is_freed_is_kept_until_it_is_given_back_unless_somebody_has_chosen(variables, kept):
    """In a fresh process, which takes and frees a large piece of memory in turn."""
    own = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    words = [sys.executable, "-c", SCRIPT, heap.__file__, str(LARGE)]
    found = json.loads(subprocess.run(words, env=own, check=True, capture_output=True, text=True).stdout)
    assert found["kept"] == kept
    assert found["at first"] < 0.1 * LARGE > found["given back"]  # the control: by itself, nothing is kept
    for when in ("after one", "after two"):  # the same memory, used again
        assert 0.9 * LARGE < found[when] < 1.1 * LARGE if kept else found[when] < 0.1 * LARGE


class Seen(Duel):
    order: ClassVar[list[str]] = []

    def on_train_batch_start(self, *_) -> None:
        self.order.append("step")

    def validation_step(self, batch: Any) -> None:
        self.log("score", batch["x"].mean(), batch_size=len(batch["x"]))


def test_a_training_keeps_it_as_long_as_it_lasts_and_nothing_else_does(monkeypatch):
    order = Seen.order
    monkeypatch.setattr(heap, "keep_freed_memory", lambda: order.append("keep") or True)
    monkeypatch.setattr(heap, "give_freed_memory_back", lambda: order.append("give back"))
    trainer(PhaseStrategy("single"), 1, 1).validate(Seen(), parts(1))
    assert order == []
    trainer(PhaseStrategy("single"), 1, 2).fit(Seen(), parts(2))
    assert order == ["keep", "step", "step", "give back"]
