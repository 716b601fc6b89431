"""Memory that is freed: kept while a training lasts, and given back after it."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from strategies import PhaseStrategy
from strategies.processes import heap
from tests.support.duel import Duel
from tests.support.parity import parts, trainer

LARGE = 256 * 2**20
STATUS = Path("/proc/self/status")


@pytest.fixture(autouse=True)
def nobodys(monkeypatch) -> Iterator[None]:
    """The variables of glibc are not set, and in the end the tests' own process has what it had."""
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    yield
    heap.give_freed_memory_back()


def resident() -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def take_and_free() -> None:
    c = ctypes.CDLL(None)
    c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    memory = c.malloc(LARGE)
    ctypes.memset(memory, 1, LARGE)
    c.free(memory)


def test_what_is_freed_is_kept_until_it_is_given_back():
    heap.give_freed_memory_back()
    before = resident()
    take_and_free()
    assert resident() - before < LARGE / 2  # the control: by itself, nothing is kept
    assert heap.keep_freed_memory()
    take_and_free()
    assert resident() - before > LARGE / 2
    take_and_free()
    assert resident() - before < 1.5 * LARGE  # the same memory, used again
    heap.give_freed_memory_back()
    assert resident() - before < LARGE / 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "1000"), ("MALLOC_ARENA_MAX", "1"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_max=1")],
)
def test_what_somebody_has_set_stays(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    before = resident()
    assert not heap.keep_freed_memory()
    take_and_free()
    assert resident() - before < LARGE / 2


def test_other_tunables_are_no_choice_of_memory(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.pthread.rseq=0")
    assert heap.keep_freed_memory()


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

    monkeypatch.setattr(heap, "keep_freed_memory", lambda: order.append("keep"))
    monkeypatch.setattr(heap, "give_freed_memory_back", lambda: order.append("give back"))
    trainer(PhaseStrategy("single"), 1, 2).fit(Seen(), parts(2))
    assert order == ["keep", "step", "step", "give back"]
