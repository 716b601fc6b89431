"""What a rank really holds and moves in each phase, measured from below: the memory of all tensors, and collectives."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gan import GanModule
from gan.phase import Phase
from strategies import PhaseStrategy
from tests.support.counted import forget
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


class Scale(TorchDispatchMode):
    """Adds up the memory of all tensors after each operation; also what FSDP2 resizes without one."""

    def __init__(self, storages: dict[int, Any]) -> None:
        super().__init__()
        self.storages = storages
        self.highest = 0
        self.payload: dict[str, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if name.startswith("c10d"):
            tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            for word, kind in KINDS.items():
                if word in name:
                    sizes = [tensor.nbytes for tensor in tensors]
                    # What all ranks gather or scatter at one of them is a list of their parts there, beside its own.
                    payload = sum(sizes) - max(sizes) if kind in ("gather", "scatter") else max(sizes)
                    self.payload[kind] = self.payload.get(kind, 0) + payload
        out = function(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                note(tensor, self.storages)
        self.highest = max(self.highest, total(self.storages))
        return out


def note(tensor: torch.Tensor, storages: dict[int, Any]) -> None:
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key not in storages:
        storages[key] = weakref.ref(storage, lambda _: storages.pop(key, None))


def noted() -> dict[int, Any]:
    """The memory of all tensors that are there."""
    gc.collect()
    storages: dict[int, Any] = {}
    for each in gc.get_objects():
        if issubclass(type(each), torch.Tensor) and not each.is_meta and not isinstance(each, DTensor):
            note(each, storages)
    return storages


def total(storages: dict[int, Any]) -> int:
    return sum(storage.nbytes() for ref in list(storages.values()) if (storage := ref()) is not None)


class WeighedStrategy(PhaseStrategy):
    """Weighs every phase that it runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weighed: list[tuple[int, Weighed]] = []

    def run(self, phase: Phase, batch: Any) -> None:
        storages = noted()
        before = total(storages)
        with Scale(storages) as scale:
            super().run(phase, batch)
        self.weighed.append((self.lightning_module.step, Weighed(phase.name, before, scale.highest, scale.payload)))


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
