"""Optimizers with two modes, such as the schedule-free ones: one kind of weights to train, another one to evaluate."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer


class EvalWeights:
    """The weights of an optimizer's evaluation mode. A policy has them in the place of a moving average.

    [Note: two modes]
    A schedule-free optimizer (Defazio et al. 2024) computes gradients at one point, and evaluates at another one: an
    average, which it can compute from its state. Its `eval()` writes that average into the weights, and its `train()`
    computes the other point again, up to rounding. A validation must not change the training, not even by rounding. So
    the weights are copied before `eval()`, and copied back after `train()`. Between phases the weights are always those
    of training. A checkpoint holds both kinds: these as the weights, the others as their average.
    """

    updates = 0  # a count of its own is not needed: the optimizer counts

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        self.optimizer, self.parameters = optimizer, dict(parameters)
        optimizer.train()

    def update(self) -> None:
        """Nothing: the optimizer's step has done it."""

    @contextmanager
    @torch.no_grad()
    def swapped(self) -> Iterator[None]:
        """Inside the `with`, the network has the weights of evaluation mode."""
        kept = [parameter.detach().clone() for parameter in self.parameters.values()]
        self.optimizer.eval()
        try:
            yield
        finally:
            with torch.no_grad():
                self.optimizer.train()
                for parameter, value in zip(self.parameters.values(), kept, strict=True):
                    parameter.copy_(value)

    def state_dict(self) -> dict[str, Tensor]:
        with self.swapped():
            return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
