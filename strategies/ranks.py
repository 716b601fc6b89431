"""The ranks of a training, as one of them sees the others."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This is rank `rank` of `size`. What it asks of the others, all of them must ask at the same time."""

    rank: int
    size: int
    device: torch.device
    per_node: int
    gather: Callable[[Any], list[Any]]  # the values of all ranks, on every rank
    broadcast: Callable[[Any], Any]  # the first rank's value
    reduce: Callable[..., Tensor]

    def smallest(self, value: Tensor) -> Tensor:
        """The smallest of all ranks' numbers."""
        return self.reduce(value, reduce_op="min")

    def first(self, question: Callable[[], bool]) -> bool:
        """The first rank's answer. No other rank calls the function."""
        if self.size == 1:
            return bool(question())
        answer = torch.tensor(self.rank == 0 and bool(question())).byte().to(self.device, non_blocking=True)
        dist.broadcast(answer, 0)
        return bool(answer)


def agree(what: object, device: torch.device, group: dist.ProcessGroup | None = None) -> Tensor:
    """Whether all ranks of the group have the same, as its `repr` says: a tensor, for one small collective.

    To read it waits for the device, so a phase reads it later.
    """
    code = zlib.crc32(repr(what).encode())
    both = torch.tensor([code, -code]).to(device, non_blocking=True)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return both[:1] == -both[1:]
