"""A small schedule-free optimizer, Defazio et al. 2024, with the two modes of its authors' package."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


class ScheduleFree(Optimizer):
    """Plain descent without a schedule: weights are y in training and x in evaluation."""

    def __init__(self, weights: Iterable[Any], lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(weights, {"lr": lr, "beta": beta, "k": 0, "training": False})

    def train(self) -> None:
        self._turn(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._turn(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _turn(self, training: bool, share: Any) -> None:
        for group in self.param_groups:
            for weight in group["params"] if group["training"] != training else ():
                if "z" in self.state[weight]:
                    weight.lerp_(self.state[weight]["z"], share(group["beta"]))
            group["training"] = training

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            assert group["training"]
            group["k"] += 1
            new, lr, beta = 1 / group["k"], group["lr"], group["beta"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                z = self.state[weight].setdefault("z", weight.clone())
                weight.lerp_(z, new).add_(weight.grad, alpha=lr * (beta * (1 - new) - 1))
                z.sub_(weight.grad, alpha=lr)
