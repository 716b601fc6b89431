"""Lines of text in memory that the ranks of one host share. A rank's line outlives the rank.

gloo ends a process at once, without an error in Python, when a collective gets more bytes than it expects. Such a rank
can tell nobody anything any more. So it has written where it is before, and the others on its host read it.
"""

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

LENGTH = 512  # bytes of a line


class Board:
    """A line for each rank. To write one costs less than a microsecond, and no rank waits for another."""

    def __init__(self, rank: int = 0, size: int = 1, run: str = "", meet: Callable[[], object] = bool) -> None:
        """All ranks make theirs together. `run` is the same on all ranks, and secret; `meet` waits for all ranks."""
        self.first = rank * LENGTH
        self.memory: mmap.mmap | None = None
        if size == 1:
            return
        path = Path(gettempdir()) / f"gan-places-{run}"
        with suppress(OSError):  # without such memory, errors say less
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(file, size * LENGTH)
                self.memory = mmap.mmap(file, size * LENGTH)
            finally:
                os.close(file)
        meet()
        with suppress(OSError):  # all of this host have it, so it needs no name any more
            path.unlink()

    def write(self, text: str) -> None:
        if self.memory is not None:
            self.memory[self.first : self.first + LENGTH] = text.encode()[:LENGTH].ljust(LENGTH, b"\0")

    def read(self, rank: int) -> str:
        """Another rank's line; empty if that is on another host, or has written nothing."""
        if self.memory is None:
            return ""
        return self.memory[rank * LENGTH : (rank + 1) * LENGTH].rstrip(b"\0").decode(errors="ignore")
