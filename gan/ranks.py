"""Sums over the ranks of a run, which gradients flow through.

A sum is an all-reduce of torch.distributed. Inside a `with`, something else can take its place: threads of one
process that add up among themselves (`summed_by`), or the recorded sums of an earlier forward (`replaying`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor

_replacement: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("replacement", default=None)


def more_than_one() -> bool:
    replacement = _replacement.get()
    if replacement is None:
        return dist.is_initialized() and dist.get_world_size() > 1
    return replacement is not _itself


@torch.compiler.disable  # each rank compiles by itself, and all must meet in one order
def sum(values: Tensor) -> Tensor:
    """The sum over all ranks, in the values' own type. It can be differentiated as often as you like."""
    return _Sum.apply(values)


class _Sum(torch.autograd.Function):
    """The gradient of a sum over ranks is itself a sum over ranks."""

    @staticmethod
    def forward(ctx, values: Tensor) -> Tensor:  # noqa: ANN001
        return (_replacement.get() or _all_reduce)(values.detach())

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # noqa: ANN001
        return _Sum.apply(gradient.contiguous())


def _all_reduce(values: Tensor) -> Tensor:
    total = values.clone()
    dist.all_reduce(total)
    return total


@contextmanager
def summed_by(add: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let this function make the sums of this thread: for ranks that are threads and not processes."""
    token = _replacement.set(add)
    try:
        yield
    finally:
        _replacement.reset(token)


def alone() -> AbstractContextManager[None]:
    """Inside the `with`, this rank is the only one: a sum is the value itself."""
    return summed_by(_itself)


def _itself(values: Tensor) -> Tensor:
    return values


def recording(sums: list[Tensor]) -> AbstractContextManager[None]:
    """Record every sum of a forward, in order, for `replaying`."""
    add = _replacement.get() or _all_reduce

    def record(values: Tensor) -> Tensor:
        total = add(values)
        sums.append(total.clone())  # a copy, because the total itself becomes part of a graph
        return total

    return summed_by(record) if more_than_one() else nullcontext()


def replaying(sums: list[Tensor]) -> AbstractContextManager[None]:
    """Use the recorded sums, in the same order: a forward that runs again must not communicate again."""
    left = iter(sums)
    return summed_by(lambda values: next(left).clone()) if more_than_one() else nullcontext()
