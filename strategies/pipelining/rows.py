"""The noise of a chunk: that of the samples of several ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from gan.errors import UserError
from gan.noise import Place


@dataclass(frozen=True)
class Rows:
    """Some neighbouring rows of a call of one rank: from `start` to `stop`, of `total`. Its first has a place."""

    first: int
    total: int
    start: int
    stop: int


@dataclass
class ChunkPlace(Place):
    """Draws for each row what its own rank would have drawn for it, in a call of the whole network."""

    parts: Sequence[Rows] = field(default_factory=tuple)

    @property
    def samples(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    def whole(self, n: int) -> int:
        return self.total // self.rows * self.parts[0].total * (n // self.samples)

    def numbers_of(self, n: int) -> list[range]:
        if n % self.samples:
            raise UserError(
                f"noise of {n} rows inside a network of policy 'pipeline', which computes {self.samples} samples at a "
                f"time; draw a row for each sample"
            )
        times = n // self.samples
        return [row for time in range(times) for part in self.parts for row in self._of_part(part, time, times)]

    def _of_part(self, part: Rows, time: int, times: int) -> list[range]:
        shift = part.first - self.first
        others = {rows: first + shift for rows, first in self.others.items()}
        of_rank = Place(self.key, part.first, self.rows, self.total, self.stride, others)
        calls = of_rank.numbers_of(part.total * times) or [range(part.total * times)]
        start, stop, size = part.total * time + part.start, part.total * time + part.stop, len(calls[0])
        return [each[max(start - copy * size, 0) : max(stop - copy * size, 0)] for copy, each in enumerate(calls)]
