"""Checks what a player's functions for optimizer and schedule have made, before anything is trained."""

from collections.abc import Mapping
from inspect import Parameter as Argument
from inspect import signature
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gan.errors import UserError
from gan.phase import Player

# Optimizers that treat each element by itself. For them, a step on pieces of weights equals a step on the weights.
ELEMENTWISE = {
    getattr(optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "Rprop")
}


def treats_elements(optimizer: Optimizer) -> bool:
    """Whether the optimizer can step pieces of weights in place of the weights."""
    return type(optimizer) in ELEMENTWISE and not optimizer.state


def check_optimizer(player: Player, optimizer: Any, weights: Mapping[str, nn.Parameter]) -> None:
    """Refuse what is no optimizer of these weights, and what a phase cannot step."""
    what = f"player '{player.name}': its function for the optimizer"
    if not isinstance(optimizer, Optimizer):
        raise UserError(
            f"{what} returned {_kind(optimizer)}; it must return one torch.optim.Optimizer, e.g. "
            f"optimizer=partial(Adam, lr=1e-4), and the schedule is a function of its own: Player(..., schedule=...)"
        )
    own = {id(weight) for weight in weights.values()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        names = {id(p): name for name, p in player.module.named_parameters()}
        name = names.get(id(foreign[0]))
        which = "a parameter that is not the player's" if name is None else f"'{name}', which requires no gradient"
        raise UserError(
            f"{what} took {which} (shape {tuple(foreign[0].shape)}); let it use only the parameters that it is given: "
            f"lambda weights: Adam(weights, lr=1e-4)"
        )
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is Argument.empty:
        raise UserError(
            f"player '{player.name}': {_kind(optimizer)} computes the loss several times in a step, by a closure, and "
            f"a phase computes it once; take an optimizer that needs no closure, e.g. Adam"
        )
    if has_modes(optimizer) and player.ema is not None:
        raise UserError(
            f"player '{player.name}': {_kind(optimizer)} keeps an average itself, which its eval() shows; leave ema out"
        )


def has_modes(optimizer: Optimizer) -> bool:
    """Whether the optimizer has train() and eval(), as the schedule-free ones. See [Note: two modes] in modes.py."""
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def check_schedule(player: Player, schedule: Any) -> None:
    """Refuse what is no schedule, or needs more than the count of updates."""
    if isinstance(schedule, ReduceLROnPlateau) or not isinstance(schedule, LRScheduler):
        why = "which needs a score" if isinstance(schedule, ReduceLROnPlateau) else "which is no LRScheduler"
        raise UserError(
            f"player '{player.name}': its function for the schedule returned {_kind(schedule)}, {why}; a schedule "
            f"counts updates, e.g. schedule=partial(CosineAnnealingLR, T_max=10_000)"
        )


def _kind(value: Any) -> str:
    return type(value).__name__
