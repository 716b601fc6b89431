"""Where each rank is in the game, so that ranks that go different ways are named and nothing of theirs is saved.

A collective waits for all ranks. If one of them plays another phase, or has no batch any more, the others wait until
the time limit of the process group, and torch's error names nobody. So after an error each rank writes into torch's
store where it is, and a rank that finds another one somewhere else says so. If the collectives of two phases happen to
fit each other, nobody waits. So all ranks compare the phases that they have played before each save and at the end.
And if they do not fit at all, gloo ends a rank at once. So each rank's place is also on the board (board.py). There a
rank that ends its epoch sees that another one of its host plays on, and does not begin to wait.
"""

import time
import traceback
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from gan import ranks
from gan.files.errors import UserError
from strategies.processes.board import NEVER, Board, Entry
from strategies.world import ALONE, World

LISTEN = 10.0  # seconds in which the other ranks reach their time limit too
RECENT = 1000  # phases whose names are kept
# In the error of a collective that has waited too long, or that met another one.
IN_VAIN = ("Timed out waiting", "timed out", "Application timeout", "op.preamble.length", "data size")

ADVICE = (
    "every rank needs the same number of batches (type max_steps=, or drop_last=True in a loader of your own), the "
    "same end (set trainer.should_stop by what is the same on all ranks), the same turns (decide a turn by what is "
    "the same on all ranks, such as gan.ranks.mean(loss)), the same calls of gan.ranks (call none in a branch that "
    "depends on the rank's own samples), the same calls of networks with batch norms (draw pictures on all ranks, by "
    "network.eval(), and write them on one), of trainer.save_checkpoint and strategy.gathered, and the same layers "
    "(where samples choose them, type +whole, as in zero3+whole, and leave out batch norms)"
)


class RanksDiverged(UserError):
    """The ranks are in different places. Each of them says so."""

    agreed = True


class Whereabouts:
    """This rank's place in the game, and after an error those of the others."""

    def __init__(
        self, world: World = ALONE, store: dist.Store | None = None, board: Board | None = None, number: int = 0
    ) -> None:
        """`store` is that of this run, in which its ranks write; None if there is only one.

        `number` is this rank's on the `board` of this host. Where some ranks only serve, `world` has another for it.
        """
        self.world, self.store, self.board, self.number = world, store, board, number
        self.here = Entry()
        self.recent: deque[tuple[int, str]] = deque(maxlen=RECENT)  # their steps and names
        self.waiting = ""  # for what, if that is known
        self.meetings = 0

    def begin_step(self, step: int) -> None:
        self._go(self.here._replace(step=step, playing=False, phase=""))

    def begin(self, step: int, phase: str) -> None:
        self.recent.append((step, phase))
        self._go(Entry(self.here.count + 1, zlib.crc32(phase.encode(), self.here.code), step, True, phase))

    def end_step(self) -> None:
        self._go(self.here._replace(playing=False))

    def _go(self, there: Entry) -> None:
        self.here, self.waiting = there, ""
        if self.board is not None:
            self.board.write(self.number, there)

    def meet(self) -> None:
        """Wait for all ranks, which must call it. Raise if one of this host plays on."""
        self.world.owed.catch_up()
        if self.store is None:
            return
        self.meetings += 1
        all_here = f"meeting {self.meetings}"
        if self.store.add(f"{all_here}, ranks", 1) == self.world.size:
            self.store.set(all_here, "")
            self.store.delete_key(f"meeting {self.meetings - 1}")  # which all have left
            self.store.delete_key(f"meeting {self.meetings - 1}, ranks")
        pause = 0.001
        while True:
            others = self._on_board()  # read before it is asked whether all are here: those who have met play on
            if self.store.check([all_here]):
                return
            for rank, there in others.items():
                if there.step > self.here.step or there.count > self.here.count:
                    self.tell()
                    error = RanksDiverged(
                        f"rank {self.world.rank} {self} where rank {rank} {there}, and would wait in vain; {ADVICE}"
                    )
                    error.agreed = False  # the other one is in a collective, and must be told
                    raise error
            time.sleep(pause)
            pause = min(2 * pause, 0.1)

    def compare(self) -> None:
        """Raise on all ranks if they have played different phases. All ranks must call it."""
        if self.world.size == 1:
            return
        self.meet()
        with self.named():
            if len(set(self.world.gather((self.here.count, self.here.code)))) == 1:
                return
            every = self.world.gather((self.here.count - len(self.recent), list(self.recent)))
        raise RanksDiverged(_first_difference(every))

    @contextmanager
    def named(self) -> Iterator[None]:
        """If a collective fails inside because the ranks are in different places, the error names them."""
        try:
            yield
        except RuntimeError as error:
            if self.world.size == 1 or not any(words in str(error) for words in IN_VAIN):
                raise
            self.waiting = _call_of_ranks(reversed(list(traceback.walk_tb(error.__traceback__))))
            self.tell()
            elsewhere = self.elsewhere() or f"rank {self.world.rank} {self} where all others do too (one may be slow)"
            raise RanksDiverged(f"{elsewhere}, so they wait for each other in vain; {ADVICE}") from error

    def tell(self) -> None:
        """Write this rank's place for the others. It waits for nobody."""
        if self.store is not None:
            with suppress(RuntimeError):  # the host of the store may be gone
                self.store.set(self._key(self.world.rank), str(self))

    def elsewhere(self) -> str:
        """This rank's place beside that of another one, which is in another place and has told so; empty if none is."""
        places = {rank: place for rank, place in self._others().items() if place != str(self)}
        if not places:
            return ""
        rank, place = min(places.items())
        return f"rank {self.world.rank} {self} where rank {rank} {place}"

    def beside(self, lost: int) -> str:
        """Where a rank was that is lost, and where this one is."""
        known = {} if self.board is None else self.board.read()
        there = known.get(lost, Entry())  # another host's is not known
        if there.step == NEVER:
            return f"rank {self.world.rank} {self}" if self.world.size > 1 else ""
        if there.count != self.here.count or there.code == self.here.code:
            return f"rank {lost} {there}, rank {self.world.rank} {self}"
        return f"rank {lost} {there} where rank {self.world.rank} {self}, and their collectives do not fit; {ADVICE}"

    def __str__(self) -> str:
        return f"{self.here}, {self.waiting}" if self.waiting else str(self.here)

    def _others(self) -> Mapping[int, str]:
        found: dict[int, str] = {}
        until = time.monotonic() + LISTEN
        with suppress(RuntimeError):
            while self.store is not None and len(found) < self.world.size - 1 and time.monotonic() < until:
                for rank in set(range(self.world.size)) - {self.world.rank} - found.keys():
                    if self.store.check([self._key(rank)]):
                        found[rank] = self.store.get(self._key(rank)).decode()
                time.sleep(0.1)
        # One that hangs outside of a collective tells nothing. Where it is on this host, the board knows.
        return {rank: str(place) for rank, place in self._on_board().items()} | found

    def _on_board(self) -> dict[int, Entry]:
        """The other ranks of this host."""
        known, first = {} if self.board is None else self.board.read(), self.number - self.world.rank
        there = {number - first: entry for number, entry in known.items() if number != self.number}
        return {rank: place for rank, place in there.items() if rank in range(self.world.size)}

    def _key(self, rank: int) -> str:
        return f"place of rank {rank}"


def _call_of_ranks(frames: Iterable[tuple[FrameType, int]]) -> str:
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
