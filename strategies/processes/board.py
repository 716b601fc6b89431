"""Where each rank of a host is in the game, in memory that the other ranks read, and who has started them.

It outlives a rank that is killed. To write costs less than a microsecond, and no rank waits for another.
"""

import mmap
import os
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir
from typing import NamedTuple

from gan.files.errors import explained

VARIABLE = "GAN_BOARD"  # an environment variable: the board's file, if who has started the ranks reads it
LAYOUT = struct.Struct("qqq?127s")
NEVER = -1  # no step has begun


class Entry(NamedTuple):
    """A rank's place: how many phases it has begun, a code of them all, and the last one."""

    count: int = 0
    code: int = 0
    step: int = NEVER
    playing: bool = False
    phase: str = ""  # empty before the step's first one

    def __str__(self) -> str:
        if self.step == NEVER:
            return "has played no phase yet"
        if not self.phase:
            return f"begins step {self.step}"
        if self.playing:
            return f"plays phase '{self.phase}' of step {self.step}"
        return f"has ended step {self.step} and begins no other"


class Board:
    """A file with an entry for each rank of a host. `first` is the number of the host's first rank.

    The file is made if there is none.
    """

    def __init__(self, path: Path, ranks: int, first: int = 0) -> None:
        self.first = first
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        try:
            os.ftruncate(file, ranks * LAYOUT.size)
            self.memory = mmap.mmap(file, ranks * LAYOUT.size)
        finally:
            os.close(file)

    @classmethod
    def new(cls, path: Path, ranks: int) -> "Board":
        """In place of the one that earlier ranks had."""
        path.unlink(missing_ok=True)
        return cls(path, ranks)

    def write(self, rank: int, entry: Entry) -> None:
        # As the steps are counted from 1 here, a rank that has written nothing has begun none.
        count, code, step, playing, phase = entry
        LAYOUT.pack_into(self.memory, (rank - self.first) * LAYOUT.size, count, code, step + 1, playing, phase.encode())

    def read(self) -> dict[int, Entry]:
        found = {}
        for rank, (count, code, step, playing, phase) in enumerate(LAYOUT.iter_unpack(self.memory), self.first):
            found[rank] = Entry(count, code, step - 1, playing, phase.rstrip(b"\0").decode(errors="replace"))
        return found

    def furthest(self) -> int:
        """The last step that a rank has begun."""
        return max(entry.step for entry in self.read().values())


def shared_board(ranks: int, first: int, run: str, meet: Callable[[], object]) -> Board | None:
    """The board of this host's ranks, which call this together; None if a host has no such memory.

    Without a board errors name fewer places. `run` is the same on all ranks, and secret; `meet` waits for all of them.
    """
    given, made = os.environ.get(VARIABLE, ""), Path(gettempdir()) / f"gan-places-{run}"
    board = None
    if given and os.path.exists(given):
        words = f"the environment variable {VARIABLE} is '{given}', which cannot be written to ({{why}}); unset it"
        with explained(words, OSError):
            board = Board(Path(given), ranks, first)
    elif ranks > 1:
        with suppress(OSError):
            board = Board(made, ranks, first)
    meet()
    with suppress(OSError):  # all of this host have it, so it needs no name any more
        made.unlink()
    return board
