"""Memory that is freed: kept while a training lasts, and given back after it."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from strategies import PhaseStrategy
from strategies.processes import heap
from tests.support.duel import Duel
from tests.support.parity import parts, trainer
from tests.support.posix import only_on_linux

LARGE = 256 * 2**20
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


def played(**variables: str) -> dict[str, Any]:
    """What a fresh process holds, which takes and frees a large piece of memory in turn."""
    own = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    words = [sys.executable, "-c", SCRIPT, heap.__file__, str(LARGE)]
    return json.loads(subprocess.run(words, env=own, check=True, capture_output=True, text=True).stdout)


@only_on_linux
def test_what_is_freed_is_kept_until_it_is_given_back():
    found = played()
    assert found["kept"]
    assert found["at first"] < 0.1 * LARGE  # the control: by itself, nothing is kept
    assert 0.9 * LARGE < found["after one"] < 1.1 * LARGE
    assert 0.9 * LARGE < found["after two"] < 1.1 * LARGE  # the same memory, used again
    assert found["given back"] < 0.1 * LARGE


@only_on_linux
@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "1000"), ("MALLOC_ARENA_MAX", "1"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=9")],
)
def test_what_somebody_has_set_stays(name, value):
    found = played(**{name: value})
    assert not found["kept"]
    assert found["after two"] < 0.1 * LARGE


@only_on_linux
def test_other_tunables_are_no_choice_of_memory():
    assert played(GLIBC_TUNABLES="glibc.pthread.rseq=0")["kept"]


def test_another_c_library_is_left_alone(monkeypatch):
    monkeypatch.setattr(heap.platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(heap, "_set", lambda _: pytest.fail("there is no mallopt"))
    assert not heap.keep_freed_memory()
    heap.give_freed_memory_back()


def test_a_training_keeps_it_as_long_as_it_lasts(monkeypatch):
    order = []

    class Seen(Duel):
        def on_train_batch_start(self, *_) -> None:
            order.append("step")

    monkeypatch.setattr(heap, "keep_freed_memory", lambda: order.append("keep") or True)
    monkeypatch.setattr(heap, "give_freed_memory_back", lambda: order.append("give back"))
    trainer(PhaseStrategy("single"), 1, 2).fit(Seen(), parts(2))
    assert order == ["keep", "step", "step", "give back"]


def test_without_a_training_memory_is_nobodys_business(monkeypatch):
    class Scored(Duel):
        def validation_step(self, batch: Any) -> None:
            self.log("score", batch["x"].mean(), batch_size=len(batch["x"]))

    for name in ("keep_freed_memory", "give_freed_memory_back"):
        monkeypatch.setattr(heap, name, lambda: pytest.fail("nothing is trained"))
    trainer(PhaseStrategy("single"), 1, 1).validate(Scored(), parts(1))
