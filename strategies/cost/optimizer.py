"""What an optimizer keeps and needs, found out by steps on small weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.optim import Optimizer

from gan.phase import Player
from strategies.cost.living import Living
from strategies.optimizers import ELEMENTWISE, has_modes


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
    optimizer = player.optimizer(weights)
    _step(optimizer, weights, foreach=None)
    tensors = [value for value in optimizer.state[weights[0]].values() if isinstance(value, torch.Tensor)]
    state = sum(t.nbytes for t in tensors if t.numel() > 1) / large
    both = _step(optimizer, weights, foreach=False) / large
    all_ = _step(optimizer, weights, foreach=True) / large / len(weights)
    uneven = _weights(64, 2)
    other = player.optimizer(uneven)
    _step(other, uneven, foreach=False)
    one = _step(other, uneven, foreach=False) / large
    return OptimizerCost(type(optimizer), state, round(one, 1), round(both - one, 1), round(all_, 1))


def _weights(*sides: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(side, side)) for side in sides]


def _step(optimizer: Optimizer, weights: list[nn.Parameter], foreach: bool | None) -> float:
    """Take a step. Returns how many bytes it needed for a while."""
    if has_modes(optimizer):
        optimizer.train()
    for group in optimizer.param_groups:
        if "foreach" in group and foreach is not None:
            group["foreach"] = foreach
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    kept = [*weights, *(weight.grad for weight in weights)]
    for state in optimizer.state.values():
        kept += [value for value in state.values() if isinstance(value, torch.Tensor)]
    with Living(leave_out=kept) as living, torch.no_grad():
        optimizer.step()
    return living.here.highest
