"""What a rank really holds and moves in each phase, measured from below: the memory of all tensors, and collectives."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from gan import GanModule
from gan.phase import Phase
from strategies import PhaseStrategy
from tests.support.counted import Counted, forget
from tests.support.parity import parts, trainer

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


class WeighedStrategy(PhaseStrategy):
    """Weighs every phase that it runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weighed: list[tuple[int, Weighed]] = []

    def run(self, phase: Phase, batch: Any) -> None:
        with Scale() as scale:
            super().run(phase, batch)
        self.weighed.append((self.lightning_module.step, Weighed(phase.name, scale.before, scale.peak, scale.payload)))


def weighed(
    game: Callable[[], GanModule],
    policy: Any,
    world: int,
    batches: Callable[[int], Any],
    bucket: int,
    steps: int = 3,
) -> list[Weighed]:
    """Each phase of the last step, of a game whose phases are all due in it."""
    with mock.patch("strategies.sharding.bucket.SIZE", bucket):
        forget()
        strategy = WeighedStrategy(policy, check=False)
        made = trainer(strategy, world, steps, precision="32-true", sync_batchnorm=True)
        made.fit(game(), parts(steps, world, batches))
    return [found for step, found in strategy.weighed if step == steps - 1]
