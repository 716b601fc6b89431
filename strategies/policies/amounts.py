"""Bytes: what a rank holds of a player, and what a collective moves."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Self

from torch import Tensor


def size_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class Held:
    """What one rank holds of a player on its device, in bytes."""

    weights: float = 0
    gradients: float = 0
    optimizer: float = 0
    average: float = 0
    flying: float = 0  # for a while only: whole weights that were gathered, and gradients that are being reduced

    def __add__(self, other: Self) -> Self:
        return type(self)(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def bytes(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class Group:
    """The ranks of a collective: `size` of them, every `stride`-th one of all."""

    size: int
    stride: int = 1


@dataclass(frozen=True)
class Collective:
    """One collective, or several of a kind: `payload` is the larger of input and output on a rank, in bytes."""

    kind: str  # "all-reduce", "all-gather", "reduce-scatter", "gather", "scatter", or "send" to the next rank
    payload: float
    group: Group

    @property
    def sent(self) -> float:
        """What a rank sends, if the ranks stand in a ring: an all-reduce is a reduce-scatter and an all-gather."""
        if self.kind == "send":
            return self.payload
        return self.payload * (self.group.size - 1) / self.group.size * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Moved:
    """Bytes by link: what a rank sends to others of its node, and what a node sends to other nodes."""

    within: float = 0
    between: float = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(self.within + other.within, self.between + other.between)

    def __mul__(self, times: float) -> Self:
        return type(self)(self.within * times, self.between * times)


def bytes_moved(collectives: Iterable[Collective], local: int) -> Moved:
    """What these collectives move, on nodes of `local` ranks. A ring leaves each of its nodes once."""
    total = Moved()
    for each in collectives:
        there = min(each.group.size, max(1, local // each.group.stride))  # of its ranks, on a node
        leaving = 0 if there == each.group.size else max(1, local // there)  # groups like it that leave a node
        total += Moved(each.sent if there > 1 else 0, each.sent * leaving)
    return total


def bubble(stages: int, chunks: int, interleaved: int = 1) -> float:
    """The part of a phase's time in which a rank of a pipeline waits for the others.

    The batch is cut into chunks, and each rank has so many (`interleaved`) stages of the player.
    """
    # GPipe, Huang et al. 2019, section 2.3; interleaved as in Narayanan et al. 2021, section 2.2. It is the same part
    # of the forward and of the backward.
    waiting = (stages - 1) / interleaved
    return waiting / (chunks + waiting)


def readable_bytes(amount: float) -> str:
    for name in ("B", "kB", "MB"):
        if amount < 999.5:
            return f"{amount:.3g} {name}"
        amount /= 1000
    return f"{amount:,.0f} GB" if amount >= 99.95 else f"{amount:.3g} GB"
