"""What a policy costs: the part of it that plans ask, before any training."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gan.phase import Phase, Player
from strategies.amounts import Held, size
from strategies.living import Living
from strategies.optimizers import ELEMENTWISE, Modes, make_optimizer
from strategies.policies.belongings import Belongings
from strategies.ranks import World


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes per byte of weights: what the state takes, and what a step takes for a while.

    On a GPU such memory is for all weights together (`all`). A CPU steps one weight after the other: it is for a weight
    (`one`), and what is left of the weight before (`left`).
    """

    kind: type | None = None
    state: float = 0.0
    one: float = 0.0
    left: float = 0.0
    all: float = 0.0

    @property
    def elementwise(self) -> bool:
        return self.kind is None or self.kind in ELEMENTWISE

    def on_cpu(self, sizes: Iterable[int], owned: float) -> float:
        """What a step takes for a while of weights of these bytes, in their order, of which a rank owns so many."""
        own = [0.0, *(min(each, owned) for each in sizes)]
        return max((self.one * now + self.left * min(before, owned - now) for before, now in pairwise(own)), default=0)


def optimizer_cost(player: Player) -> OptimizerCost:
    """What a player's optimizer costs. A player that is frozen has none."""
    if player.frozen:
        return OptimizerCost()
    weights, large = _weights(64, 64), 4 * 64 * 64
    optimizer = make_optimizer(player, weights)
    _step(optimizer, weights, foreach=None)
    tensors = [value for value in optimizer.state[weights[0]].values() if isinstance(value, Tensor)]
    state = sum(t.nbytes for t in tensors if t.numel() > 1) / large
    both = _step(optimizer, weights, foreach=False) / large
    all_ = _step(optimizer, weights, foreach=True) / large / len(weights)
    uneven = _weights(64, 2)
    other = make_optimizer(player, uneven)
    _step(other, uneven, foreach=False)
    one = _step(other, uneven, foreach=False) / large
    return OptimizerCost(type(optimizer), state, round(one, 1), round(both - one, 1), round(all_, 1))


def _weights(*sides: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(side, side)) for side in sides]


def _step(optimizer: Optimizer, weights: list[nn.Parameter], foreach: bool | None) -> float:
    """Take a step. Returns how many bytes it needed for a while."""
    if isinstance(optimizer, Modes):
        optimizer.train()
    for group in optimizer.param_groups:
        if "foreach" in group and foreach is not None:
            group["foreach"] = foreach
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    kept: list[Tensor] = [*weights, *(weight.grad for weight in weights if weight.grad is not None)]
    for state in optimizer.state.values():
        kept += [value for value in state.values() if isinstance(value, Tensor)]
    with Living(leave_out=kept) as living, torch.no_grad():
        optimizer.step()
    return living.here.highest


class Costs:
    """Memory and messages of a policy. It needs no other rank, and no weight needs a value.

    A policy for many devices says here what it shards and sends. See strategies/cost/ for who asks.
    """

    player: Player
    world: World
    belongings: Belongings
    weights: Mapping[str, nn.Parameter]  # those that learn

    def holds(self) -> Held:
        """What a rank holds of the player between phases, on its device. Buffers count as weights."""
        learning = size(self.weights.values())
        state = self.optimizer_cost.state * learning
        return Held(size(self.belongings.parameters.values()) + self.buffers, 0, state, self.averaged_part * learning)

    def at_most(self) -> Held:
        """The same in a phase in which it learns, without activations. No phase is known yet, so it is a bound."""
        return replace(self.holds(), gradients=size(self.weights.values()))

    def on_host(self) -> Held:
        """What a rank holds of the player in the CPU's memory, between phases and in its update."""
        return Held()

    def idle(self, phase: Phase) -> float:
        """The part of a phase in which this rank waits for others that compute: the bubble of a pipeline."""
        return 0.0

    @cached_property
    def optimizer_cost(self) -> OptimizerCost:
        return optimizer_cost(self.player)

    @property
    def averaged_part(self) -> int:
        """How many averages are kept of each weight that learns."""
        return int(self.player.ema is not None and self.player.follows is None)

    @property
    def buffers(self) -> int:
        """The bytes of buffers, and of their averages."""
        kinds = 2 if self.averaged_part and self.player.ema_buffers == "averaged" else 1
        return kinds * size(self.player.module.buffers())

    def step_bytes(self, owned: float) -> float:
        """What the optimizer needs for a while, to step so many bytes of weights."""
        if self.world.device.type != "cpu":
            return self.optimizer_cost.all * owned
        return self.optimizer_cost.on_cpu([size([each]) for each in self.weights.values()], owned)
