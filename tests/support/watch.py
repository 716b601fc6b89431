"""Watching a phase from below: every collective with its bytes, among the other operations in their order."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gan import GanModule
from gan.phase import Phase
from strategies import PhaseStrategy
from tests.support.parity import parts, trainer, vectors


class Trace(TorchDispatchMode):
    """The operations of one phase; the reducer's, which start in C++, are seen as well."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self.operations.append((str(function), size))
        return function(*args, **(kwargs or {}))

    @property
    def collectives(self) -> list[tuple[str, int]]:
        return [(name.split(".")[1], size) for name, size in self.operations if name.startswith("c10d")]


class WatchedStrategy(PhaseStrategy):
    """Keeps a trace of every phase it runs, or another mode that has watched it."""

    def __init__(self, *args: Any, mode: Any = Trace, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.traces: list[tuple[int, str, Any]] = []
        self.mode = mode

    def run(self, phase: Phase, batch: Any) -> None:
        with self.mode() as mode:
            super().run(phase, batch)
        self.traces.append((self.lightning_module.step, phase.name, mode))


def watched(
    game: Callable[[], GanModule], policy: Any, world: int, steps: int, batches: Any = vectors, **settings: Any
) -> list[tuple[int, str, Trace]]:
    """Step, phase and trace of every phase of a training."""
    strategy = WatchedStrategy(policy, check=False)
    made = trainer(strategy, world, steps, **{"sync_batchnorm": True, **settings})
    made.fit(game(), parts(steps, world, batches))
    return strategy.traces


def moved(
    game: Callable[[], GanModule], policy: Any, world: int, steps: int, *batches: Any, **settings: Any
) -> list[Any]:
    """Step, phase and collectives of every phase."""
    traces = watched(game, policy, world, steps, *batches, **settings)
    return [(step, phase, trace.collectives) for step, phase, trace in traces]


def operations(game: Callable[[], GanModule], policy: Any, world: int, steps: int) -> list[str]:
    """The names of all operations of the last phase."""
    return [name for name, _ in watched(game, policy, world, steps)[-1][2].operations]


def looked(look: Callable[..., Any], game: Callable[[], GanModule], policy: Any, world: int, steps: int = 1) -> Any:
    """What `look` finds in the strategy and the game before the last step ends."""
    seen: list[Any] = []
    looks = LambdaCallback(on_train_batch_end=lambda trainer, game, *_: seen.append(look(trainer.strategy, game)))
    made = trainer(PhaseStrategy(policy, check=False), world, steps, callbacks=[looks])
    made.fit(game(), parts(steps, world))
    return seen[-1]


def sizes_of(game: Callable[[], GanModule]) -> dict[str, int]:
    """Bytes of each player's weights in float64."""
    players = game().configure_players()
    return {each.name: 8 * sum(weight.numel() for weight in each.module.parameters()) for each in players}
