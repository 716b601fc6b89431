"""Tries whether an optimizer steps each weight by itself, so that ranks can share the weights out."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from gan.phase import MakeOptimizer
from strategies.batches.random_state import untouched
from strategies.observers import OwnCollectives
from strategies.optimizers.making import for_want_of_closure
from strategies.optimizers.updater import Modes
from strategies.sharding.resharded_parameter import resharded

STEPS = 20  # some, such as those that warm up, look at other weights after a few steps only
ROUNDING = 1e-6  # of what a weight moves; in float64, so it is far above what another order of sums gives


def why_not_apart(make: MakeOptimizer, weights: Mapping[str, nn.Parameter]) -> str | None:
    """Why the weights cannot be stepped apart from each other, on several ranks; None if they can.

    [Note: a trial of the optimizer]
    zero1 may give each rank some of the weights, whole, and a pipeline does. That is exact only if the step on a weight
    does not depend on the other weights, as it would by a norm over all of them. Its class does not say so. So a few of
    the weights are stepped together, and then each of them alone, with the same gradients. The result must be the same.
    Gradients of different sizes make a dependence show. The weights get their values back. Where they have none yet,
    others take their place.
    """
    weights = {
        name: nn.Parameter(torch.ones(weight.shape, dtype=weight.dtype)) if resharded(weight) else weight
        for name, weight in weights.items()
    }
    made = [make(list(weights.values())) for _ in range(2)]
    if made[0] is made[1]:
        return "its function returns the same optimizer twice, and must make a new one each time"
    few: dict[str, nn.Parameter] = {}  # the two smallest weights of each number of dimensions
    for name, weight in sorted(weights.items(), key=lambda pair: pair[1].numel()):
        if weight.numel() and sum(weight.ndim == other.ndim for other in few.values()) < 2:
            few[name] = weight
    before = {name: weight.detach().to(torch.float64, copy=True) for name, weight in few.items()}
    try:
        together = _stepped(make, weights, few, few.keys())
        for name in few:
            for other, value in _stepped(make, weights, few, {name}).items():
                expected = together[name] if other == name else before[other]
                moved = (expected - before[other]).abs().max()
                if not (value - expected).abs().max() <= ROUNDING * moved:
                    return f"its step on weight '{name}' depends on other weights, or on random numbers"
    except _Communicates as error:
        return f"its step calls torch.distributed ({error}), where ranks would meet with different weights"
    except Exception as error:
        if for_want_of_closure(error):
            raise
        return f"it fails if it has only some of the weights ({type(error).__name__}: {error})"
    return None


class _Communicates(Exception):
    """In a trial all ranks have the same weights, and a collective would tell nothing."""


def _refuse_collective(where: str) -> None:
    raise _Communicates(where)


def _stepped(
    make: MakeOptimizer, weights: Mapping[str, nn.Parameter], few: Mapping[str, nn.Parameter], chosen: Collection[str]
) -> dict[str, Tensor]:
    """The few weights after some steps of an optimizer that has only the chosen ones."""
    before = {weight: weight.data for weight in few.values()}
    kept = {few[name] for name in chosen}
    generator = torch.Generator().manual_seed(0)
    try:
        for weight, value in before.items():
            weight.data = value.to(torch.float64, copy=True)
        # Where collectives are looked for, what is compiled with fullgraph=True fails.
        with untouched(), torch.compiler.set_stance("force_eager"), OwnCollectives(_refuse_collective):
            optimizer = make(list(weights.values()))
            for group in optimizer.param_groups:
                group["params"] = [weight for weight in group["params"] if weight in kept]
            if isinstance(optimizer, Modes):
                optimizer.train()
            for _ in range(STEPS):
                for number, weight in enumerate(few.values()):
                    gradient = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                    weight.grad = gradient.to(weight.device).mul_(10.0**number)
                optimizer.step()
        return {name: weight.detach().clone() for name, weight in few.items()}
    finally:
        for weight, value in before.items():
            weight.data, weight.grad = value, None
