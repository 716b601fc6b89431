"""What an optimizer keeps and needs, found out by steps on small weights."""

from dataclasses import dataclass

import torch
from torch import nn

from gan.phase import Player
from strategies.cost.living import Living
from strategies.optimizers import ELEMENTWISE, has_modes


@dataclass(frozen=True)
class OptimizerCost:
    """Bytes per byte of weights: what the state takes, and what a step takes for a while.

    Such memory for a while is for the largest weight on a CPU, which steps one weight after the other (`one`), and for
    all weights together on a GPU (`all`).
    """

    kind: type | None = None
    state: float = 0.0
    one: float = 0.0
    all: float = 0.0

    @property
    def elementwise(self) -> bool:
        return self.kind is None or self.kind in ELEMENTWISE


def optimizer_cost(player: Player) -> OptimizerCost:
    """What a player's optimizer costs. A player that is frozen has none."""
    if player.frozen:
        return OptimizerCost()
    weights = [nn.Parameter(torch.zeros(64, 64)) for _ in range(2)]
    optimizer = player.optimizer(weights)
    if has_modes(optimizer):
        optimizer.train()
    _step(optimizer, weights)
    size = weights[0].nbytes
    tensors = [value for value in optimizer.state[weights[0]].values() if isinstance(value, torch.Tensor)]
    state = sum(t.nbytes for t in tensors if t.numel() > 1) / size
    together = [group for group in optimizer.param_groups if "foreach" in group]
    passing = []
    for foreach in (False, True):
        for group in together:
            group["foreach"] = foreach
        passing.append(_step(optimizer, weights) / size)
    return OptimizerCost(type(optimizer), state, round(passing[0], 1), round(passing[1] / len(weights), 1))


def _step(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> float:
    """Take a step. Returns how many bytes it needed for a while."""
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    kept = [*weights, *(weight.grad for weight in weights)]
    for state in optimizer.state.values():
        kept += [value for value in state.values() if isinstance(value, torch.Tensor)]
    with Living(leave_out=kept) as living, torch.no_grad():
        optimizer.step()
    return living.highest
