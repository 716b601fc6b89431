"""Optimizers as people write them: some look at whole weights, some no rank can step in part, one has two modes."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Adam, Muon, Optimizer


class Shampoo(Optimizer):
    """Matrices by the roots of their gradients' second moments, other weights by their norms.

    Its state has what torch's own never has: a number that is no tensor, a list of tensors, and a count of no weight.
    """

    def __init__(self, weights: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        steps = self.state.setdefault("steps", torch.zeros(1, dtype=torch.int64))  # as MADGRAD does
        steps += 1
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.sub_(self._direction(weight), alpha=group["lr"] * (1 + 1 / steps.item()))

    def _direction(self, weight: Tensor) -> Tensor:
        gradient, state = weight.grad, self.state[weight]
        state["count"] = state.get("count", 0) + 1
        if weight.ndim != 2:
            return gradient * (weight.norm() + 0.1) / (gradient.norm() + 0.1) / state["count"] ** 0.5
        factors = state.setdefault("factors", [torch.eye(n, dtype=gradient.dtype) for n in gradient.shape])
        factors[0].addmm_(gradient, gradient.mT)
        factors[1].addmm_(gradient.mT, gradient)
        left, right = map(fourth_root, factors)
        return left @ gradient @ right


def fourth_root(matrix: Tensor) -> Tensor:
    """Of its inverse."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.pow(-0.25) @ vectors.mT


class MuonAndAdam(Optimizer):
    """torch's Muon for matrices, Adam for the rest: as the guide shows it."""

    def __init__(self, weights: Iterable[nn.Parameter], lr: float) -> None:
        weights = list(weights)
        matrices, others = [w for w in weights if w.ndim == 2], [w for w in weights if w.ndim != 2]
        self.parts = Muon(matrices, lr=lr), Adam(others, lr=lr)
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self) -> None:
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()


class NormedTogether(Optimizer):
    """It divides all gradients by their norm, so no weight can be stepped without the others."""

    def __init__(self, weights: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        there = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        norm = torch.stack([weight.grad.norm() for weight in there]).norm()
        for weight in there:
            weight.sub_(weight.grad / norm, alpha=self.param_groups[0]["lr"])


class Optimistic(Optimizer):
    """It steps twice as far, and back by the gradient before (Daskalakis et al. 2018)."""

    @torch.no_grad()
    def step(self) -> None:
        for weight in (each for group in self.param_groups for each in group["params"]):
            before = self.state[weight].get("before", torch.zeros_like(weight))
            weight.sub_(2 * weight.grad - before, alpha=self.defaults["lr"])
            self.state[weight]["before"] = self.kept(weight.grad)

    kept = staticmethod(torch.clone)


class Careless(Optimistic):
    """As published: it keeps the gradient itself."""

    kept = staticmethod(torch.Tensor.detach)


class Drawing(NormedTogether):
    @torch.no_grad()
    def step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            weight.add_(torch.randn_like(weight), alpha=1e-3)


class Dealing(NormedTogether):
    """As the published distributed Muon: each rank steps some of the weights, and sends them to the others."""

    @torch.no_grad()
    def step(self) -> None:
        for number, weight in enumerate(self.param_groups[0]["params"]):
            owner = number % dist.get_world_size()
            if owner == dist.get_rank():
                weight.sub_(weight.grad, alpha=1e-3)
            dist.broadcast(weight.detach(), owner)


class ScheduleFree(Optimizer):
    """As Defazio et al. 2024, with the two modes of their package: weights are y in training and x in evaluation."""

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
