"""A resumed training whose optimizers and schedules are made with other numbers than before.

[Note: made otherwise]
A person may resume with another learning rate, and a checkpoint has the old one. The current numbers cannot tell what
the person wants, for schedules and hooks move them. So a checkpoint also notes what the player's functions had made:
the plain values of the optimizer's groups before there is a schedule, and those of the schedule at its begin
(`Updater.made`). Where a resumed training makes other numbers, these count. Where all are the same, nothing is touched,
and the training goes on to the bit. Checkpoints of earlier versions lack the note, and their numbers are kept.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from gan.files.errors import UserError
from gan.phase import Player
from strategies import private
from strategies.optimizers import Updater
from strategies.random_state import untouched

HOW = {"foreach", "fused", "capturable", "differentiable"}  # how an optimizer computes: as in the checkpoint


def check_made(player: Player, updater: Updater, then: Mapping[str, Any]) -> None:
    """Refuse another class, and another choice such as amsgrad: what the checkpoint has in it would not fit."""
    now, advice = updater.made, "resume with the settings it was trained with"
    for what in ("optimizer", "schedule"):
        if then[what] != now[what]:
            raise UserError(
                f"player '{player.name}': the checkpoint's {what} is {then[what] or 'none'}, and this run's is "
                f"{now[what] or 'none'}; {advice}"
            )
    for before, made in zip(then["groups"], now["groups"], strict=False):
        for name in _made_otherwise(before, made):
            was, is_now = before[name], made[name]
            # An optimizer asks whether there is one.
            if isinstance(is_now, bool | str | None) or was is None or (name == "momentum" and not was):
                raise UserError(
                    f"player '{player.name}': its {now['optimizer']} was trained with {name}={was!r}, and has "
                    f"{name}={is_now!r} now; {advice}"
                )


def go_on(player: Player, updater: Updater, then: Mapping[str, Any]) -> str:
    """Let what a checkpoint has filled go on with the numbers that are made now. Returns a sentence that says so.

    A number that was as made becomes the new one. A learning rate that a hook has moved is scaled. If a schedule is
    made otherwise, it goes where one that is made now would be after as many steps: to change its numbers in the
    middle would give rates of neither.
    """
    now, groups, schedule = updater.made, updater.optimizer.param_groups, updater.schedule
    changed: list[str] = []
    for group, before, made in zip(groups, then["groups"], now["groups"], strict=False):
        for name in _made_otherwise(before, made):
            if group.get(name) == before[name]:
                _put(group, name, made[name])
            elif name == "lr" and before[name]:
                _put(group, name, group[name] * made[name] / before[name])
            else:  # training has moved it
                continue
            changed.append(name)
    moved = _made_otherwise(then["state"], now["state"])
    if schedule is not None and moved and all("lr" in made for made in now["groups"]):
        _replay(player, updater, schedule)
        changed.append(now["schedule"])
    what = ", ".join(dict.fromkeys(changed))
    return f"player '{player.name}' goes on with {what} as made now, and otherwise than before" if what else ""


def _replay(player: Player, updater: Updater, schedule: LRScheduler) -> None:
    """Let a schedule that is made now make all steps of this one, which then goes on from there."""
    assert player.schedule is not None
    for group, made in zip(updater.optimizer.param_groups, updater.made["groups"], strict=True):
        group.pop("initial_lr", None)  # schedules of torch keep one that is there
        for name in {"lr", "initial_lr"} & made.keys():
            _put(group, name, made[name])
    with untouched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of steps before the optimizer's first
        again = player.schedule(updater.optimizer)
        for _ in range(private.steps_of(schedule)):
            again.step()
    schedule.load_state_dict(again.state_dict())


def _put(group: dict[str, Any], name: str, value: Any) -> None:
    """A rate that is a tensor stays the same one, for a compiled step has it."""
    if isinstance(group.get(name), Tensor):
        group[name].fill_(value)
    else:
        group[name] = value


def _made_otherwise(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [name for name in now if name in before and before[name] != now[name] and name not in HOW]
