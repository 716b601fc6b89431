"""Noise that belongs to a sample: it does not change with the number of ranks or micro-batches.

Inside a phase, every row of a batch has a place in the global batch. `randn` and `rand` draw each row from its own
generator, seeded with (seed, step, phase, call, place). So any rank that holds the sample draws the same row.
Outside a phase they are torch's own functions.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor


def seed_for(*parts: int | str) -> int:
    """A seed made of parts, the same on every machine. Parts that differ by one give unrelated seeds."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@dataclass
class Place:
    """Which rows of the global batch are being computed: `rows` rows of `total`, every `stride`-th from `first` on.

    `others` is for a batch of several loaders with batch sizes of their own: the first row of each, by its number of
    rows. `calls` counts the draws. A copy of a place continues at the same count, so it draws the same noise.
    """

    key: tuple[int | str, ...]
    first: int
    rows: int
    total: int
    stride: int = 1
    others: Mapping[int, int] = field(default_factory=dict)
    calls: int = 0

    def numbers(self, n: int) -> list[tuple[int, int]]:
        """For each of n rows its number in the global batch, and which copy of that sample it is.

        They are the rows of the loader that has n rows here. A batch of fakes and reals together has each sample twice.
        """
        first, rows = (self.others[n], n) if n in self.others else (self.first, self.rows)
        return [(first + row % rows * self.stride, row // rows) for row in range(n)]

    def seeds(self, n: int) -> list[int]:
        """A seed for each of n rows. Two copies of a sample have two seeds."""
        call, self.calls = self.calls, self.calls + 1
        return [seed_for(*self.key, call, *place) for place in self.numbers(n)]


_place: ContextVar[Place | None] = ContextVar("place", default=None)


def here() -> Place | None:
    """The place that is set now; None outside a phase."""
    return _place.get()


@contextmanager
def at(place: Place | None) -> Iterator[None]:
    """Set the place for the code inside the `with`; None means outside a phase."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def randn(shape: Sequence[int], like: Tensor | None = None) -> Tensor:
    """Normal noise, a row for each sample, with the device and dtype of `like`."""
    return _draw(torch.randn, shape, like)


def rand(shape: Sequence[int], like: Tensor | None = None) -> Tensor:
    """Uniform noise in [0, 1), a row for each sample, with the device and dtype of `like`."""
    return _draw(torch.rand, shape, like)


@torch.compiler.disable  # a compiled graph would keep the seeds of its first call
def _draw(draw: Callable[..., Tensor], shape: Sequence[int], like: Tensor | None) -> Tensor:
    kind = {} if like is None else {"device": like.device, "dtype": like.dtype}
    place = here()
    if place is None:
        return draw(tuple(shape), **kind)
    generator = torch.Generator(device=kind.get("device", "cpu"))
    rows = [draw(tuple(shape[1:]), generator=generator.manual_seed(seed), **kind) for seed in place.seeds(shape[0])]
    return torch.stack(rows)
