"""A trial of an optimizer: does it treat each weight by itself?"""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from gan.phase import Player
from strategies.optimizers import has_modes
from strategies.random_state import untouched

STEPS = 3
ROUNDING = 1e-6  # of what a weight moves; in float64, so it is far above what another order of sums gives


def why_not_apart(player: Player, weights: Mapping[str, nn.Parameter]) -> str | None:
    """Why the weights cannot be stepped apart from each other, on several ranks; None if they can.

    [Note: a trial of the optimizer]
    zero1 may give each rank some of the weights, whole. It is exact only if the step on a weight does not depend on the
    other weights, as it would by a norm over all of them. Its class does not say so. So a few of the weights are
    stepped together, and then each of them alone, with the same gradients. The result must be the same. Gradients of
    different sizes make a dependence show. The weights get their values back.
    """
    made = [player.optimizer(list(weights.values())) for _ in range(2)]
    if made[0] is made[1]:
        return "its function returns the same optimizer twice, and must make a new one each time"
    few = _few(weights)
    before = {name: weight.detach().to(torch.float64, copy=True) for name, weight in few.items()}
    try:
        together = _stepped(player, weights, few, few.keys())
        for name in few:
            alone = _stepped(player, weights, few, {name})
            for other, value in alone.items():
                expected = together[name] if other == name else before[other]
                moved = (expected - before[other]).abs().max()
                if not (value - expected).abs().max() <= ROUNDING * moved:
                    return f"its step on weight '{name}' depends on other weights, or on random numbers"
    except Exception as error:  # noqa: BLE001, a person's own optimizer may fail in any way
        return f"it fails if it has only some of the weights ({type(error).__name__}: {error})"
    return None


def _few(weights: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The two smallest weights of each number of dimensions."""
    few: dict[str, nn.Parameter] = {}
    for name in sorted(weights, key=lambda name: weights[name].numel()):
        weight = weights[name]
        if weight.numel() and sum(weight.ndim == other.ndim for other in few.values()) < 2:
            few[name] = weight
    return few


def _stepped(
    player: Player, weights: Mapping[str, nn.Parameter], few: Mapping[str, nn.Parameter], chosen: Collection[str]
) -> dict[str, Tensor]:
    """The few weights after some steps of an optimizer that has only the chosen ones."""
    before = {weight: weight.data for weight in few.values()}
    kept = {few[name] for name in chosen}
    generator = torch.Generator().manual_seed(0)
    try:
        for weight, value in before.items():
            weight.data = value.to(torch.float64, copy=True)
        with untouched():
            optimizer = player.optimizer(list(weights.values()))
            for group in optimizer.param_groups:
                group["params"] = [weight for weight in group["params"] if weight in kept]
            if has_modes(optimizer):
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
