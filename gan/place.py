"""Places: which rows of the global batch are computed here, and the seeds of their draws."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from gan.files.errors import UserError

COPIES = 4  # so many rows for each sample are taken for rows of samples, where no trial has shown it
MASK = 2**64 - 1
GROUP = 16  # numbers: draws take them from pages in groups, see [Note: pages] in gan/noise.py
CALL, TAKEN = 2**32 - 1, 32  # in Place.calls: the bits with the number of draws, and the first bit of taken groups


def seed_for(*parts: int | str) -> int:
    """A seed made of parts, the same on every machine. Parts that differ by one give unrelated seeds."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little") >> 1


class Drawn(NamedTuple):
    """A draw of a network by torch's own functions.

    `rows` is how many samples were computed where it was drawn. `dim` is the dimension of the samples; None is one draw
    for the whole batch. `whole`: they were all, so the draw is the same whichever dimension is that of samples.
    `beside`: several rows of one sample lie side by side, as the heads of attention do.
    """

    name: str
    shape: tuple[int, ...]
    rows: int
    dim: int | None
    whole: bool = False
    beside: bool = False

    def like(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a draw is of this kind. What is before the samples is often a time, and varies."""
        return self.name == name and (len(self.shape) == len(shape) if self.dim else self.shape[1:] == tuple(shape[1:]))


@dataclass
class Place:
    """Which rows of the global batch are being computed: `rows` rows of `total`, every `stride`-th from `first` on.

    `others` is for a batch of several loaders with batch sizes of their own: the first row of each, by its number of
    rows. `calls` counts the draws, and from bit TAKEN on the groups of numbers that they took from `pages`. A copy of a
    place continues at the same count, so it draws the same noise.

    The rest is for draws of networks by torch's own functions (strategies/draws.py). `follows`: they follow the sample
    too. `known` are draws of which a trial has shown where their samples are, by call. `drawn` are those so far.
    """

    key: tuple[int | str, ...]
    first: int
    rows: int
    total: int
    stride: int = 1
    others: Mapping[int, int] = field(default_factory=dict)
    calls: int = 0
    follows: bool = True
    known: Mapping[int, Drawn] = field(default_factory=dict)
    drawn: dict[int, Drawn] = field(default_factory=dict)
    pages: dict[tuple[Any, ...], Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._seed = seed_for(*self.key)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "pages": {}}  # another process makes its own

    def next_call(self, taken: int = 0) -> int:
        """Count a draw, which takes so many numbers from pages."""
        calls = self.calls
        self.calls = calls + 1 + (-(-taken // GROUP) << TAKEN)
        return calls & CALL

    def seed(self, call: int, number: int) -> int:
        """The seed of a block or row of a draw. It costs little, because there may be many."""
        # The finalizer of SplitMix64 (Steele, Lea and Flood 2014), shortened.
        bits = self._seed + call * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 & MASK
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
        return bits ^ bits >> 27

    def seeds(self, n: int) -> list[int]:
        """A seed for each of n rows. Two copies of a sample have two seeds."""
        call = self.next_call()
        return [self.seed(call, row) for part in self.numbers_of(n) or [range(n)] for row in part]

    def numbers(self, n: int) -> range:
        """The numbers, in the global batch, of the samples of a draw of n rows.

        They are those of the loader that has n rows here. A batch of fakes and reals together has each sample twice.
        """
        first, rows = (self.others[n], n) if n in self.others else (self.first, self.rows)
        return range(first, first + rows * self.stride, self.stride)

    def numbers_of(self, n: int) -> list[range] | None:
        """The rows, of the whole draw, that a draw of n rows has here. None stands for all, in their order."""
        if self.rows == self.total:
            return None
        numbers = self.numbers(n)
        if n == len(numbers):
            return [numbers]
        if n % len(numbers):
            raise UserError(
                f"noise of {n} rows in a phase whose batch has {self.rows}: other ranks would draw other rows than one "
                f"device does; draw a row for each sample and take some, or type common=True for one draw of all ranks"
            )
        total = self.whole(len(numbers))
        starts = range(0, n // len(numbers) * total, total)
        return [range(start + numbers.start, start + numbers.stop, numbers.step) for start in starts]

    @property
    def samples(self) -> int:
        """How many samples are computed here."""
        return self.rows

    def whole(self, n: int) -> int:
        """How many rows a draw of n rows has in the whole global batch."""
        return self.total * n // self.rows

    def drawn_by_network(self, call: int, name: str, shape: Sequence[int]) -> Drawn:
        """A draw of a network: which dimension has the samples.

        A trial has seen a shape with few samples, and with all ranks' (strategies/draws.py). Without one, what
        looks like a row for each sample, or a few, is taken for it.
        """
        n, known = shape[0] if shape else 0, self.known.get(call)
        if (
            known is None and self.known
        ):  # a call that no trial has seen is like others that have their samples further back
            known = next((each for each in self.known.values() if each.dim and each.like(name, shape)), None)
        if known is not None and known.like(name, shape):
            dim = known.dim if known.dim is not None and self._fits(shape[known.dim]) else None
        else:
            dim = 0 if self._fits(n) and n <= COPIES * max(self.samples, *self.others, 1) else None
        beside = known is not None and known.beside and dim == 0
        drawn = Drawn(name, tuple(shape), self.samples, dim, self.samples == self.total, beside)
        self.drawn[call] = drawn
        return drawn

    def parts_of(self, drawn: Drawn) -> list[range] | None:
        """The rows that a draw of a network has here. None stands for all, in their order."""
        if drawn.dim is None:
            return None
        n = drawn.shape[drawn.dim]
        parts = self.numbers_of(self.samples if drawn.beside else n)
        if parts is None or not drawn.beside:
            return parts
        each = n // self.samples
        return [range(number * each, (number + 1) * each) for part in parts for number in part]

    def _fits(self, n: int) -> bool:
        return n > 0 and (n % self.samples == 0 or n in self.others)


current: ContextVar[Place | None] = ContextVar("place", default=None)


def here() -> Place | None:
    """The place that is set now; None outside a phase."""
    return current.get()


@contextmanager
def at(place: Place | None) -> Iterator[None]:
    """Set the place for the code inside the `with`; None means outside a phase."""
    token = current.set(place)
    try:
        yield
    finally:
        current.reset(token)


def go_to(place: Place | None, calls: int) -> None:
    """Set the place, and how many draws it has made, for the rest of the innermost `at`."""
    current.set(place)
    if place is not None:
        place.calls = calls
