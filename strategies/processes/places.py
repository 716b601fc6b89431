"""Where each rank is in the game, so that ranks that go different ways are named and nothing of theirs is saved.

A collective waits for all ranks. If one of them plays another phase, or has no batch any more, the others wait until
the time limit of the process group, and torch's error names nobody. So after an error each rank writes into torch's
store where it is, and a rank that finds another one somewhere else says so. If the collectives of two phases happen to
fit each other, nobody waits. So all ranks compare the phases that they have played before each save and at the end.
And if they do not fit at all, gloo ends a rank at once. So each rank's place is also in memory that the others see.
"""

import mmap
import os
import struct
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import gettempdir
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from gan import ranks
from gan.files.errors import UserError
from strategies.private import default_store

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


LISTEN = 10.0  # seconds in which the other ranks reach their time limit too
RECENT = 1000  # phases whose names are kept

ADVICE = (
    "every rank needs the same number of batches (type max_steps=, or drop_last=True in a loader of your own), the "
    "same turns (decide a turn by what is the same on all ranks, such as gan.ranks.mean(loss)), and the same calls of "
    "gan.ranks (call none in a branch that depends on the rank's own samples)"
)


class Apart(UserError):
    """The ranks are in different places. Each of them says so."""

    agreed = True


class Places:
    """This rank's place in the game, and after an error those of the others."""

    def __init__(self, rank: int = 0, size: int = 1, run: str = "", gather: Callable[[Any], list[Any]] = list) -> None:
        """`run` is a name for this run, the same on all ranks; `gather` returns the values of all ranks."""
        self.rank, self.size, self.run, self.gather = rank, size, run, gather
        self.board = Board(rank, size, run, lambda: gather(None))
        self.store = default_store() if size > 1 else None
        self.playing = False
        self.since = time.monotonic()  # when the place has changed
        self.longest: dict[str, float] = {}  # the longest time of each phase, in seconds
        self.code = self.count = 0  # of the phases that have begun
        self.name = b""  # of the last one
        self.recent: deque[tuple[int, str]] = deque(maxlen=RECENT)  # their steps and names
        self.waiting = ""  # for what, if that is known

    def begin(self, step: int, phase: str) -> None:
        """A phase begins."""
        self._leave()
        self.playing = True
        self.name = phase.encode()
        self.code = zlib.crc32(self.name, self.code)
        self.count += 1
        self.recent.append((step, phase))
        self.board.write(self.count, self.code, step, True, self.name)

    def end_step(self) -> None:
        """The last phase of a step has ended."""
        self._leave()
        self.playing = False
        if self.recent:
            self.board.write(self.count, self.code, self.recent[-1][0], False, self.name)

    def _leave(self) -> None:
        now, self.waiting = time.monotonic(), ""
        if self.playing:
            phase, took = self.recent[-1][1], now - self.since
            if took > self.longest.get(phase, 0.0):
                self.longest[phase] = took
        self.since = now

    def compare(self) -> None:
        """Raise on all ranks if they have played different phases. All ranks must call it."""
        if self.size == 1:
            return
        with self.named():
            codes = self.gather((self.count, self.code))
            if len(set(codes)) == 1:
                return
            every = self.gather((self.count - len(self.recent), list(self.recent)))
        raise Apart(_first_difference(every))

    @contextmanager
    def named(self) -> Iterator[None]:
        """If a collective fails inside because the ranks are in different places, the error names them."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            if self.size == 1 or not _in_vain(error):
                raise
            self.waiting = call_of_ranks(reversed(list(traceback.walk_tb(error.__traceback__))))
            self.tell()
            elsewhere = self.elsewhere()
            if not elsewhere:
                raise
            raise Apart(f"{elsewhere}, so they wait for each other in vain; {ADVICE}") from error

    def connect(self) -> None:
        """Take a connection of its own to the store. A main thread that waits for others may hold the usual one."""
        if self.store is not None:
            with suppress(RuntimeError, dist.DistError):
                self.store = default_store().clone()

    def tell(self) -> None:
        """Write this rank's place for the others. It waits for nobody."""
        if self.size > 1:
            with suppress(RuntimeError, dist.DistError):  # the host of the store may be gone
                self.store.set(self._key(self.rank), str(self))

    def elsewhere(self) -> str:
        """This rank's place beside that of another one, which is in another place and has told so; empty if none is."""
        places = {rank: place for rank, place in self._others().items() if place != str(self)}
        if not places:
            return ""
        rank, place = min(places.items())
        return f"rank {self.rank} {self} where rank {rank} {place}"

    def beside(self, lost: int) -> str:
        """Where a rank was that is lost, and where this one is."""
        there = self.board.read(lost)
        if there is None:
            return f"rank {self.rank} {self}" if self.size > 1 else ""
        place = _said(there.step, there.phase.decode(errors="replace"), there.playing)
        if there.count != self.count or there.code == self.code:
            return f"rank {lost} {place}, rank {self.rank} {self}"
        return f"rank {lost} {place} where rank {self.rank} {self}, and their collectives do not fit; {ADVICE}"

    def __str__(self) -> str:
        place = _said(*self.recent[-1], self.playing) if self.recent else "has played no phase yet"
        return f"{place}, {self.waiting}" if self.waiting else place

    def _others(self) -> Mapping[int, str]:
        found: dict[int, str] = {}
        until = time.monotonic() + LISTEN
        with suppress(RuntimeError, dist.DistError):
            while len(found) < self.size - 1 and time.monotonic() < until:
                for rank in set(range(self.size)) - {self.rank} - found.keys():
                    if self.store.check([self._key(rank)]):
                        found[rank] = self.store.get(self._key(rank)).decode()
                time.sleep(0.1)
        return found

    def _key(self, rank: int) -> str:
        return f"place of {self.run}, rank {rank}"


def _said(step: int, phase: str, playing: bool) -> str:
    return f"plays phase '{phase}' of step {step}" if playing else f"has ended step {step} and begins no other"


def call_of_ranks(frames: Iterable[tuple[FrameType, int]]) -> str:
    """In which call of gan.ranks the code is, in words; empty if in none. `frames` begins with the innermost one."""
    call = ""
    for frame, line in frames:
        module = frame.f_globals.get("__name__", "")
        if module == ranks.__name__:
            call = frame.f_code.co_name
        elif call == "backward":
            return "in the backward of gan.ranks"
        elif call and not module.startswith("torch."):
            return f"in gan.ranks.{call} ({Path(frame.f_code.co_filename).name}, line {line})"
    return ""


def _first_difference(every: list[tuple[int, list[tuple[int, str]]]]) -> str:
    """`every` has for each rank how many phases it has forgotten, and the others."""
    first = max(forgotten for forgotten, _ in every)
    plays = [recent[first - forgotten :] for forgotten, recent in every]
    longest = max(map(len, plays))
    for number in range(longest):
        there = [each[number] if number < len(each) else None for each in plays]
        if len(set(there)) > 1:
            said = [
                f"rank {rank} has played phase '{play[1]}' of step {play[0]}" if play else f"rank {rank} has ended"
                for rank, play in enumerate(there)
            ]
            return f"the ranks have gone different ways: {', '.join(said)}; {ADVICE}"
    return f"the ranks have gone different ways some {longest} phases ago; {ADVICE}"


def _in_vain(error: BaseException) -> bool:
    """Whether this is the error of a collective that has waited too long, or that met another one."""
    text = str(error)
    return any(words in text for words in ("Timed out waiting", "timed out", "op.preamble.length", "data size"))
