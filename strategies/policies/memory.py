"""The memory of a player under a policy, in bytes: what plans ask before any training."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from gan.phase import MakeOptimizer, Player
from strategies.observers import Living
from strategies.optimizers.updater import Modes, elementwise
from strategies.policies.amounts import Held, size_of
from strategies.policies.belongings import Belongings
from strategies.world import World

SQUARES = ((64, 64), (64, 64))


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes per byte of weights: what the state takes, and what a step takes for a while."""

    elementwise: bool = True
    state: float = 0.0
    one: float = 0.0  # for a while, on a CPU, which steps one weight after the other: for a weight
    left: float = 0.0  # and what is left of the weight before
    all: float = 0.0  # for a while, on a GPU: for all weights together

    def on_cpu(self, sizes: Iterable[int], owned: float) -> float:
        """What a step takes for a while of weights of these bytes, in their order, of which a rank owns so many."""
        own = [0.0, *(min(each, owned) for each in sizes)]
        return max((self.one * now + self.left * min(before, owned - now) for before, now in pairwise(own)), default=0)


def optimizer_cost(make: MakeOptimizer, shapes: Sequence[Sequence[int]] = SQUARES) -> OptimizerCost:
    """What an optimizer of such weights costs. It gets stand-ins of all: it may group them by place or dimensions."""
    weights = [_stand_in(shape) for shape in shapes]
    optimizer = _fresh(make, weights)
    _step(optimizer, weights, foreach=None)
    state = sum(_state(optimizer, weight) * math.prod(shape) for weight, shape in zip(weights, shapes, strict=True))
    all_ = _step(optimizer, weights, foreach=True) / size_of(weights)
    one, left = _on_cpu(make) or (
        _step(optimizer, weights, foreach=False) / max(size_of([each]) for each in weights),
        0,
    )
    whole = sum(map(math.prod, shapes))
    return OptimizerCost(elementwise(optimizer), state / whole, round(one, 1), round(left, 1), round(all_, 1))


def _on_cpu(make: MakeOptimizer) -> tuple[float, float] | None:
    """What a step takes for a weight, and what is left of the one before; None if it takes only the player's own."""
    found = []
    for shapes in (SQUARES, (SQUARES[0], (2, 2))):
        weights = [_stand_in(shape) for shape in shapes]
        try:
            optimizer = _fresh(make, weights)
        except Exception:  # noqa: BLE001 - the author's function
            return None
        _step(optimizer, weights, foreach=False)
        found.append(_step(optimizer, weights, foreach=False) / size_of(weights[:1]))
    both, one = found
    return (one, both - one) if both else None


def _fresh(make: MakeOptimizer, weights: list[nn.Parameter]) -> Optimizer:
    """An optimizer of stand-ins. A state that the author's function has loaded has the shapes of the true weights."""
    optimizer = make(weights)
    if elementwise(optimizer):
        optimizer.state.clear()
    return optimizer


def _stand_in(shape: Sequence[int]) -> nn.Parameter:
    return nn.Parameter(torch.zeros([min(side, 64 if dim < 2 else 8) for dim, side in enumerate(shape)]))


def _state(optimizer: Optimizer, weight: nn.Parameter) -> float:
    """The bytes of state per byte of a weight."""
    tensors = [value for value in optimizer.state.get(weight, {}).values() if isinstance(value, Tensor)]
    return sum(each.nbytes for each in tensors if each.ndim) / max(1, weight.nbytes)


def _step(optimizer: Optimizer, weights: list[nn.Parameter], foreach: bool | None) -> float:
    """Take a step. Returns how many bytes it needed for a while."""
    if isinstance(optimizer, Modes):
        optimizer.train()
    for group in optimizer.param_groups:
        if "foreach" in group and foreach is not None:
            group["foreach"] = foreach
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    states = [each for each in tree_leaves(list(optimizer.state.values())) if isinstance(each, Tensor)]
    kept = [*weights, *(weight.grad for weight in weights if weight.grad is not None), *states]
    with Living(leave_out=kept) as living, torch.no_grad():
        optimizer.step()
    return living.highest


class PlayerMemory:
    """What a rank holds of a player. To know that needs no other rank, and no values of weights.

    A policy for many devices says here what it shards: the first properties. See strategies/cost/ for who asks. With
    the option offload all that a rank owns is in the CPU's memory.
    """

    max_ranks: int | None = 1
    keep = True  # whole weights between phases; otherwise all parameters are shared out, also those that do not learn
    always_whole = False  # whether they are whole in every phase that reads them, where they are shared out between

    def __init__(self, player: Player, world: World, options: Mapping[str, Any], belongings: Belongings) -> None:
        self.player, self.world, self.options, self.belongings = player, world, options, belongings
        self.requiring_grad = {name: p for name, p in belongings.parameters.items() if p.requires_grad}
        self.weights = {} if player.frozen else self.requiring_grad  # those that learn

    @property
    def shared_out(self) -> Mapping[str, nn.Parameter]:
        return self.weights if self.keep else self.belongings.parameters

    @property
    def divided(self) -> bool:
        """Whether there is something to share out, and somebody to share with."""
        return self.max_ranks != 1 and self.world.size > 1 and bool(self.shared_out)

    @property
    def whole_bytes(self) -> float:
        """The weights that are whole between phases."""
        return 0.0 if self.divided and not self.keep else size_of(self.belongings.parameters.values())

    @property
    def shard_bytes(self) -> float:
        """This rank's shards of weights, where they have memory of their own."""
        return 0.0

    @property
    def owned_bytes(self) -> float:
        """The weights that this rank's optimizer and average work on."""
        return size_of(self.weights.values())

    @property
    def kept_gradients(self) -> float:
        """Gradients that stay between phases."""
        return 0.0

    @property
    def offloaded(self) -> bool:
        return self.divided and "offload" in self.options

    def _owned(self) -> Held:
        owned = self.owned_bytes
        return Held(self.shard_bytes, 0, self.optimizer_cost.state * owned, self.averaged_part * owned)

    def between_phases(self) -> Held:
        """What a rank holds of the player between phases, on its device. Buffers count as weights."""
        whole = Held(self.whole_bytes + self.buffers, self.kept_gradients)
        return whole if self.offloaded else whole + self._owned()

    def in_a_phase(self) -> Held:
        """The same in a phase in which it learns, without activations, and without the buckets that fly."""
        gradients = max(self.kept_gradients, 0 if self.offloaded else self.owned_bytes)
        whole = size_of(self.belongings.parameters.values()) if self.divided and self.always_whole else 0
        return replace(self.between_phases(), gradients=gradients) + Held(flying=whole)

    def on_host(self) -> Held:
        """What a rank holds of the player in the CPU's memory, between phases and in its update."""
        return replace(self._owned(), gradients=self.owned_bytes) if self.offloaded else Held()

    @property
    def makers(self) -> dict[str, MakeOptimizer]:
        """What makes the player's optimizers: its own under "", and those of phases."""
        return {} if self.player.optimizer is None else {"": self.player.optimizer, **self.belongings.optimizers}

    @cached_property
    def optimizer_cost(self) -> OptimizerCost:
        """Of all optimizers of the player: their states are there at once, and one of them steps at a time."""
        shapes = [weight.shape for weight in self.weights.values()]
        each = [optimizer_cost(make, shapes) for make in self.makers.values()] if shapes else []
        most = {name: max((getattr(cost, name) for cost in each), default=0.0) for name in ("one", "left", "all")}
        return OptimizerCost(all(cost.elementwise for cost in each), sum(cost.state for cost in each), **most)

    @property
    def averaged_part(self) -> int:
        """How many averages are kept of each weight that learns."""
        return int(self.player.ema is not None and self.player.follows is None)

    @property
    def buffers(self) -> int:
        """The bytes of buffers, and of their averages."""
        kinds = 2 if self.averaged_part and self.player.ema_buffers == "averaged" else 1
        return kinds * size_of(self.player.module.buffers())

    def step_bytes(self, owned: float) -> float:
        """What the optimizer needs for a while, to step so many bytes of weights."""
        if self.world.device.type != "cpu":
            return self.optimizer_cost.all * owned
        return self.optimizer_cost.on_cpu([size_of([each]) for each in self.weights.values()], owned)
