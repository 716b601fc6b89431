"""zero2 and zero3 on paper: buckets are reduced, and gathered, in the order in which a phase needs them."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from strategies.paper.amounts import Group
from strategies.paper.paper import Paper
from strategies.paper.trace import Trace
from strategies.sharding import bucket
from strategies.sharding.unshard_on_read import UnshardOnRead


class PaperBucket:
    """The bytes of a bucket: whole, as it is reduced; whole, as it is gathered; and a rank's shard."""

    def __init__(
        self, weights: Mapping[str, nn.Parameter], ranks: int, dtype: torch.dtype | None, twice: bool = False
    ) -> None:
        """`twice`: it is gathered into other memory first, as FSDP2 does."""
        self.twice = twice
        like = next(iter(weights.values()))
        self.weights = weights
        self.ids = frozenset(map(id, weights.values()))
        length = -(-sum(weight.numel() for weight in weights.values()) // ranks)
        self.shard = length * like.element_size()
        self.whole = self.shard * ranks
        of = like.dtype if dtype is None or not like.is_floating_point() else dtype
        self.gathered = length * ranks * of.itemsize
        self.copy = 0.0 if of == like.dtype else length * of.itemsize  # of the shard, to gather it


def paper_buckets(
    weights: Mapping[str, nn.Parameter], ranks: int, dtype: torch.dtype | None = None
) -> list[PaperBucket]:
    """The buckets of sharding/bucket.py."""
    return [PaperBucket(part, ranks, dtype) for part in bucket.parts(weights)]


class Reduced(Paper):
    """zero2: as sharding/reduce_scatter.py, each bucket is reduced as soon as it has all of its gradients.

    `world` are all ranks, `share` those that own the player once, `copies` those that own the same shard.
    `gathered` bytes of weights are gathered after the update. `home`: shards are in the CPU's memory.
    """

    def __init__(
        self,
        name: str,
        weights: Mapping[str, nn.Parameter],
        step: float,
        buckets: Sequence[PaperBucket],
        world: Group,
        share: Group,
        copies: Group,
        gathered: float = 0,
        home: bool = False,
    ) -> None:
        super().__init__(name, weights, step)
        self.buckets, self.world, self.share, self.copies = buckets, world, share, copies
        self.gathered, self.home = gathered, home
        self.bucket_of = {key: number for number, each in enumerate(buckets) for key in each.ids}
        self.missing: list[set[int]] = []
        self.flat: list[float] = []  # of the buckets whose reduction has begun: the bytes of their whole gradients
        self.in_flight = 2  # how many of them keep these bytes
        self.turns: list[int] = []

    def begin(self, trace: Trace, learning: bool) -> None:
        super().begin(trace, learning)
        self.missing, self.flat, self.turns = [set(each.ids) for each in self.buckets], [], self.order()

    def order(self) -> list[int]:
        """In which the buckets are reduced."""
        return list(reversed(range(len(self.buckets))))

    def gradient(self, weight: int) -> None:
        super().gradient(weight)
        if self.last:
            self.missing[self.bucket_of[weight]].discard(weight)
            while len(self.flat) < len(self.buckets) and not self.missing[self.turns[len(self.flat)]]:
                self.reduce()

    def reduce(self) -> None:
        """The next bucket: its gradients are laid into one piece of memory, of which the shard remains."""
        if len(self.flat) >= self.in_flight:
            self.land(len(self.flat) - self.in_flight)
        each = self.buckets[self.turns[len(self.flat)]]
        self.flat.append(each.whole)
        self.take(flying=each.whole)
        self.take(gradients=each.shard)
        self.take(gradients=-sum(self.sizes[key] for key in each.ids & self.reached))
        self.move("reduce-scatter", each.whole, self.share)
        self.move("all-reduce", each.shard, self.copies)

    def land(self, number: int) -> None:
        """The reduction of a bucket has ended."""
        self.take(flying=-self.flat[number])
        self.flat[number] = 0

    def finish(self) -> None:
        while len(self.flat) < len(self.buckets):
            self.reduce()
        for number in range(len(self.flat)):
            self.land(number)
        if self.home:
            self.now.gradients = 0
        self.move("all-reduce", 8 * len(self.weights), self.share)  # norms

    def update(self) -> None:
        super().update()
        self.move("all-gather", self.gathered, self.share)


class Gathered(Reduced):
    """zero3: the very code that gathers in training, `UnshardOnRead`, decides what is gathered, from a trace."""

    def __init__(self, *args: Any, others: Sequence[PaperBucket], whole: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.storage = _Storage(self, [*self.buckets, *others], whole)
        everything = [weight for each in self.storage.buckets for weight in each.weights.values()]
        self.own = {id(weight): weight for weight in everything}
        self.on_read = UnshardOnRead(everything, (), self.storage, "zero3")
        self.phase = ExitStack()
        self.recomputing = False
        self.views: set[_Bucket] = set()  # the buckets that a block uses which is computed again
        self.left: list[float] = []  # bytes of those that are resharded, and still used

    def order(self) -> list[int]:
        return self.on_read.in_turn(len(self.buckets))

    def backward(self, last: bool) -> None:
        super().backward(last)
        self.turns = self.order()

    def begin(self, trace: Trace, learning: bool) -> None:
        super().begin(trace, learning)
        self.recomputing = False
        whole = self.storage.always_whole or trace.second_order
        self.on_read.before.setdefault(trace.phase, [])
        self.phase.enter_context(
            self.on_read.during(trace.phase, piecewise=not whole, now=whole and learning and bool(self.weights))
        )

    def enter(self, module: nn.Module) -> None:
        weights = dict.values(module._parameters)
        self.on_read.enter([weight for weight in weights if weight is not None])

    def leave(self) -> None:
        self.on_read.leave()

    def read(self, weights: tuple[int, ...]) -> None:
        self.on_read.read([self.own[key] for key in weights if key in self.own])
        if self.recomputing:
            self.views |= {self.storage.buckets[self.on_read.number[key]] for key in weights if key in self.own}

    def again(self) -> None:
        """torch's checkpoint keeps what the block reads, and not its place, until backward has passed the block."""
        self.take(flying=-sum(self.left))
        self.left.clear()
        self.views.clear()
        self.recomputing = True

    def need(self, weight: int) -> None:
        if weight in self.own:
            self.on_read.fetch(self.on_read.number[weight])

    def end(self) -> None:
        self.again()
        self.phase.close()


class _Storage:
    """What `UnshardOnRead` calls of a storage."""

    def __init__(self, paper: Gathered, buckets: Sequence[PaperBucket], whole: bool) -> None:
        self.buckets = [_Bucket(paper, each) for each in buckets]
        self.group = None
        self.always_whole = whole

    @property
    def unsharded(self) -> bool:
        return all(each.unsharded for each in self.buckets)

    def reshard(self) -> None:
        for each in self.buckets:
            each.reshard()


class _Bucket:
    """What `UnshardOnRead` calls of a bucket."""

    def __init__(self, paper: Gathered, bytes_: PaperBucket) -> None:
        self.paper, self.bytes, self.weights = paper, bytes_, bytes_.weights
        self.device = None
        self.there = False
        self.work: bool | None = None
        self.fetch: Any = None

    @property
    def unsharded(self) -> bool:
        return self.there and self.work is None

    def start_unshard(self) -> None:
        paper, bytes_ = self.paper, self.bytes
        copied = bytes_.copy or (bytes_.shard if paper.home else 0)
        paper.take(flying=bytes_.gathered + copied)
        paper.take(flying=-copied)
        paper.move("all-gather", bytes_.gathered, paper.share)
        self.there = self.work = True

    def unshard(self) -> None:
        if self.work is None:
            self.start_unshard()
        if self.bytes.twice:
            self.paper.take(flying=self.bytes.gathered)
            self.paper.take(flying=-self.bytes.gathered)
        self.work = None

    def reshard(self) -> None:
        if self.there and self in self.paper.views:
            self.paper.left.append(self.bytes.gathered)
        elif self.there:
            self.paper.take(flying=-self.bytes.gathered)
        self.there, self.work = False, None
