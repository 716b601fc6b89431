"""The noise of a chunk: that of the samples of several ranks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    def size(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    def _of_rank(self, part: Rows) -> Place:
        shift = part.first - self.first
        others = {rows: first + shift for rows, first in self.others.items()}
        return Place(self.key, part.first, self.rows, self.total, self.stride, others, self.calls)

    def _times(self, n: int) -> int:
        if n % self.size:
            raise UserError(
                f"noise of {n} rows inside a network of policy 'pipeline', which computes {self.size} samples at a "
                f"time; draw a row for each sample"
            )
        return n // self.size

    def seeds(self, n: int) -> list[int]:
        times = self._times(n)
        drawn = [self._of_rank(part).seeds(part.total * times) for part in self.parts]
        self.calls += 1
        return [
            seed
            for time in range(times)
            for part, seeds in zip(self.parts, drawn, strict=True)
            for seed in seeds[part.total * time + part.start : part.total * time + part.stop]
        ]

    def streams(self, n: int, device: torch.device) -> tuple[Tensor, int]:
        times = self._times(n)
        drawn = [self._of_rank(part).streams(part.total * times, device) for part in self.parts]
        self.calls += 1
        rows = [
            starts[part.total * time + part.start : part.total * time + part.stop]
            for time in range(times)
            for part, (starts, _) in zip(self.parts, drawn, strict=True)
        ]
        return torch.cat(rows), drawn[0][1]
