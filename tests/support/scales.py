"""What a rank really holds and moves in each phase, measured from below: the memory of all tensors, and collectives."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from gan import GanModule
from tests.support.counted import Counted, forget
from tests.support.parity import parts, trainer
from tests.support.watch import WatchedStrategy

KINDS = {
    **{"allreduce": "all-reduce", "allgather": "all-gather", "reduce_scatter": "reduce-scatter"},
    **{"c10d.gather": "gather", "c10d.scatter": "scatter"},
}


@dataclass
class Weighed:
    """A phase on one rank: bytes before it, the most bytes in it, and the payload of its collectives by kind."""

    phase: str
    before: int
    highest: int
    payload: dict[str, int] = field(default_factory=dict)


class Scale(Counted):
    """Also what FSDP2 resizes without an operation, and the payload of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.payload: dict[str, int] = {}
        self.before = self.count_all().now()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name.startswith("c10d"):
            sizes = [leaf.nbytes for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            for word, kind in KINDS.items():
                if word in name:
                    # What all ranks gather or scatter at one of them is a list of their parts there, beside its own.
                    payload = sum(sizes) - max(sizes) if kind in ("gather", "scatter") else max(sizes)
                    self.payload[kind] = self.payload.get(kind, 0) + payload
        return super().__torch_dispatch__(function, types, args, kwargs)


def weighed_on(
    make_loader: Callable[[], Any], game: Callable[[], GanModule], policy: Any, world: int, bucket: int
) -> list[Weighed]:
    """Each phase of the last step, of a game whose phases are all due in it."""
    with mock.patch("strategies.sharding.bucket.SIZE", bucket):
        forget()
        loader = make_loader()
        strategy = WatchedStrategy(policy, check=False, mode=Scale)
        trainer(strategy, world, len(loader), precision="32-true", sync_batchnorm=True).fit(game(), loader)
    last = [(phase, scale) for step, phase, scale in strategy.traces if step == len(loader) - 1]
    return [Weighed(phase, scale.before, scale.peak, scale.payload) for phase, scale in last]


def weighed(
    game: Callable[[], GanModule], policy: Any, world: int, batches: Callable[[int], Any], bucket: int, steps: int
) -> list[Weighed]:
    return weighed_on(partial(parts, steps, world, batches), game, policy, world, bucket)
