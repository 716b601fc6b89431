"""Where each rank is in the game, so that ranks that go different ways are named and nothing of theirs is saved.

A collective waits for all ranks. If one of them plays another phase, or has no batch any more, the others wait until
the time limit of the process group, and torch's error names nobody. So after an error each rank writes into torch's
store where it is, and a rank that finds another one somewhere else says so. If the collectives of two phases happen to
fit each other, nobody waits. So all ranks compare the phases that they have played before each save and at the end.
"""

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from gan.errors import UserError
from strategies.private import default_store

LISTEN = 10.0  # seconds in which the other ranks reach their time limit too
RECENT = 1000  # phases whose names are kept

ADVICE = (
    "every rank needs the same number of batches (type max_steps=, or drop_last=True in a loader of your own) and the "
    "same turns: decide a turn by what is the same on all ranks, such as gan.ranks.mean(loss)"
)


class Apart(UserError):
    """The ranks are in different places. Each of them says so."""

    agreed = True


class Places:
    """This rank's place in the game, and after an error those of the others."""

    def __init__(self, rank: int = 0, size: int = 1, run: str = "", gather: Callable[[Any], list[Any]] = list) -> None:
        """`run` is a name for this run, the same on all ranks; `gather` returns the values of all ranks."""
        self.rank, self.size, self.run, self.gather = rank, size, run, gather
        self.playing = False
        self.code = self.count = 0  # of the phases that have begun
        self.recent: deque[tuple[int, str]] = deque(maxlen=RECENT)  # their steps and names

    def begin(self, step: int, phase: str) -> None:
        """A phase begins."""
        self.playing = True
        self.code = zlib.crc32(phase.encode(), self.code)
        self.count += 1
        self.recent.append((step, phase))

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
            self.tell()
            places = {rank: place for rank, place in self._others().items() if place != str(self)}
            if not places:
                raise
            rank, place = min(places.items())
            raise Apart(
                f"rank {self.rank} {self} where rank {rank} {place}, so they wait for each other in vain; {ADVICE}"
            ) from error

    def tell(self) -> None:
        """Write this rank's place for the others. It waits for nobody."""
        if self.size > 1:
            with suppress(RuntimeError, dist.DistError):  # the host of the store may be gone
                default_store().set(self._key(self.rank), str(self))

    def __str__(self) -> str:
        if not self.recent:
            return "has played no phase"
        step, phase = self.recent[-1]
        return f"plays phase '{phase}' of step {step}" if self.playing else f"has ended step {step} and begins no other"

    def _others(self) -> Mapping[int, str]:
        found: dict[int, str] = {}
        until = time.monotonic() + LISTEN
        with suppress(RuntimeError, dist.DistError):
            while len(found) < self.size - 1 and time.monotonic() < until:
                for rank in set(range(self.size)) - {self.rank} - found.keys():
                    if default_store().check([self._key(rank)]):
                        found[rank] = default_store().get(self._key(rank)).decode()
                time.sleep(0.1)
        return found

    def _key(self, rank: int) -> str:
        return f"place of {self.run}, rank {rank}"


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
