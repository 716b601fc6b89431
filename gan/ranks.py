"""What all ranks have, together: `mean`, `sum` and `gather`, through which gradients flow.

    from gan import ranks
    center = ranks.mean(scores.mean(0))         # the mean over the global batch
    keys = ranks.gather(self.encode(images))    # the rows of the global batch, in its order
    keys, own = ranks.gather(found, own=True)   # and where this rank's are: keys[own] equals found

Use them in losses and inside any module, where one device would look at its whole batch. Every rank that plays the
phase must call them in the same order. On one device each returns what it was given.

[Note: the gradient of what ranks share]
Each rank differentiates its own loss, and the strategy averages the gradients over the ranks. Let all n ranks compute
the same loss f from a sum T. One device has the gradient f'(T). The gradients of the ranks' parts of T must average to
it. So each part gets the sum over the ranks of f'(T), which is n times as much. The gradient of a sum is therefore a
sum, that of a mean is a mean, and a gathered row gets the sum of what all ranks give it.

A mean and a gathering are made of sums: the mean is a sum divided by the number of ranks, and to gather, each rank adds
its rows to zeros. A sum is an all-reduce of torch.distributed. Inside a `with`, something else can take its place:
a sum over other ranks (`summed_by`), or the recorded sums of an earlier forward (`replaying`).

[Note: the world of a forward]
On a GPU, autograd runs backward in a thread of its own for each device, which is inside no `with` of ours. So a sum
keeps the world of its forward for its gradient. What else adds up over ranks in backward, or runs a forward again
there, takes the forward's world along: `here()` in the forward, and `at(...)` in the backward.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from gan.files.errors import UserError
from gan.files.loading import not_compiled


@dataclass(frozen=True)
class World:
    """`add` sums a tensor over all ranks. `of_gradients` is the world that adds up gradients of sums, if another."""

    number: int
    size: int
    add: Callable[[Tensor], Tensor]
    of_gradients: "World | None" = None


_replacement: ContextVar[World | None] = ContextVar("replacement", default=None)
_of_process: World | None = None  # for threads that have none of their own


def more_than_one() -> bool:
    replacement = _replacement.get() or _of_process
    if replacement is None:
        return dist.is_initialized() and dist.get_world_size() > 1
    return replacement.add is not _itself


def _world() -> World:
    return _replacement.get() or _of_process or World(dist.get_rank(), dist.get_world_size(), _all_reduce)


def number_and_size() -> tuple[int, int]:
    return (_world().number, _world().size) if more_than_one() else (0, 1)


# torch.compile leaves these functions alone: each rank compiles by itself, and all must meet in one order.


@not_compiled
def sum(values: Tensor) -> Tensor:
    """The sum over all ranks, in the values' own type; that of booleans is a count.

    It can be differentiated as often as you like. See [Note: the gradient of what ranks share].
    """
    if values.dtype == torch.bool:
        values = values.long()
    return _Sum.apply(values, _world()) if more_than_one() else values


@not_compiled
def mean(values: Tensor) -> Tensor:
    """The mean over all ranks of floating-point values. It can be differentiated as often as you like."""
    if not (values.is_floating_point() or values.is_complex()):
        raise UserError(f"gan.ranks.mean of {values.dtype} values has no such type; type values.float() first")
    return sum(values) / _world().size if more_than_one() else values


@overload
def gather(rows: Tensor) -> Tensor: ...
@overload
def gather(rows: Tensor, own: Literal[True]) -> tuple[Tensor, slice]: ...
@not_compiled
def gather(rows: Tensor, own: bool = False) -> Tensor | tuple[Tensor, slice]:
    """All ranks' rows, concatenated along dimension 0: the rows of the global batch, in its order.

    With `own` also the slice of them that is this rank's. Ranks may have different numbers of rows. If a sample has
    several rows, they must be neighbours; so gather fakes and reals one by one, not concatenated. It can be
    differentiated as often as you like.
    """
    if not rows.ndim:
        raise UserError("gan.ranks.gather concatenates rows, and a scalar has none; type gather(value[None])")
    if not more_than_one():
        return (rows, slice(0, len(rows))) if own else rows
    world = _world()
    counts = torch.full((world.size,), len(rows) if rows.is_meta else 0, device="cpu")  # without values all are alike
    if not rows.is_meta:
        counts = counts.to(rows.device)
        counts[world.number] = len(rows)
        counts = world.add(counts)
    starts = list(accumulate(counts.tolist(), initial=0))
    before, after = starts[world.number], starts[-1] - starts[world.number + 1]
    padded = torch.cat([rows.new_zeros(before, *rows.shape[1:]), rows, rows.new_zeros(after, *rows.shape[1:])])
    every = sum(padded).bool() if rows.dtype == torch.bool else sum(padded)
    return (every, slice(before, before + len(rows))) if own else every


class _Sum(torch.autograd.Function):
    """The gradient of a sum over ranks is itself a sum over ranks, and so is the derivative in a direction."""

    @staticmethod
    def forward(values: Tensor, world: World) -> Tensor:
        return world.add(values.detach())

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, World], output: Tensor) -> None:  # noqa: ANN001
        ctx.world = inputs[1].of_gradients or inputs[1]  # see [Note: the world of a forward]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ANN001
        return _Sum.apply(gradient, ctx.world), None

    @staticmethod
    def jvp(ctx, tangent: Tensor, _: None) -> Tensor:  # noqa: ANN001
        return _Sum.apply(tangent, _world())


made = 0  # sums over ranks, in this process so far


def _all_reduce(values: Tensor) -> Tensor:
    global made
    made += 1
    total = values.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


def here() -> World | None:
    """The world for what this forward will add up in backward, without recording; None stands for torch.distributed."""
    replacement = _replacement.get()
    return replacement and (replacement.of_gradients or replacement)


@contextmanager
def at(world: World | None) -> Iterator[None]:
    """Inside the `with`, this thread adds up in that world."""
    token = _replacement.set(world)
    try:
        yield
    finally:
        _replacement.reset(token)


def go_to(world: World | None) -> None:
    """Add up in that world for the rest of the innermost `at`."""
    _replacement.set(world)


def summed_by(add: Callable[[Tensor], Tensor], number: int, size: int) -> AbstractContextManager[None]:
    """Let this function make the sums of this thread, in place of torch.distributed."""
    return at(World(number, size, add))


@contextmanager
def alone(in_all_threads: bool = False) -> Iterator[None]:
    """Inside the `with`, this rank is the only one. `in_all_threads`: in autograd's too, where forwards run again."""
    global _of_process
    _of_process = World(0, 1, _itself) if in_all_threads else _of_process
    try:
        with summed_by(_itself, 0, 1):
            yield
    finally:
        _of_process = None if in_all_threads else _of_process


def _itself(values: Tensor) -> Tensor:
    return values


def recording(sums: list[Tensor]) -> AbstractContextManager[None]:
    """Record every sum of a forward, in order, for `replaying`."""
    if not more_than_one():
        return nullcontext()
    world = _world()

    def record(values: Tensor) -> Tensor:
        total = world.add(values)
        sums.append(total.clone())  # a copy, because the total itself becomes part of a graph
        return total

    return at(replace(world, add=record, of_gradients=world.of_gradients or world))


def replaying(sums: list[Tensor]) -> AbstractContextManager[None]:
    """Use the recorded sums, in the same order: a forward that runs again must not communicate again."""
    if not more_than_one():
        return nullcontext()
    world, left = _world(), iter(sums)
    return at(replace(world, add=lambda values: next(left).clone(), of_gradients=world.of_gradients or world))
