"""Where the ranks of one host are, in memory that they share. A rank's entry outlives the rank.

gloo ends a process at once, without an error in Python, when a collective gets more bytes than it expects. Such a rank
can tell nobody anything any more. So it has written where it is before, and the others on its host read it.
"""

import mmap
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

LAYOUT = struct.Struct("qqq?127s")


class Entry(NamedTuple):
    """A rank's place: how many phases it has begun, a code of them all, and the last one."""

    count: int
    code: int
    step: int
    playing: bool
    phase: bytes


class Board:
    """An entry for each rank. To write one costs less than a microsecond, and no rank waits for another."""

    def __init__(self, rank: int = 0, size: int = 1, run: str = "", meet: Callable[[], object] = bool) -> None:
        """All ranks make theirs together. `run` is the same on all ranks, and secret; `meet` waits for all ranks."""
        self.first = rank * LAYOUT.size
        self.memory: mmap.mmap | None = None
        if size == 1:
            return
        path = Path(gettempdir()) / f"gan-places-{run}"
        with suppress(OSError):  # without such memory, errors say less
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(file, size * LAYOUT.size)
                self.memory = mmap.mmap(file, size * LAYOUT.size)
            finally:
                os.close(file)
        meet()
        with suppress(OSError):  # all of this host have it, so it needs no name any more
            path.unlink()

    def write(self, count: int, code: int, step: int, playing: bool, phase: bytes) -> None:
        if self.memory is not None:
            LAYOUT.pack_into(self.memory, self.first, count, code, step, playing, phase)

    def read(self, rank: int) -> Entry | None:
        """Another rank's entry; None if that is on another host, or has begun no phase."""
        if self.memory is None:
            return None
        entry = Entry(*LAYOUT.unpack_from(self.memory, rank * LAYOUT.size))
        return entry._replace(phase=entry.phase.rstrip(b"\0")) if entry.count else None
