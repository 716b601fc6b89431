"""Whether a checkpoint has what a training needs to go on, of the kinds that this training has itself."""

from collections.abc import Iterable, Mapping
from typing import Any

from lightning import Trainer

from gan.contents import KINDS, alike, need
from gan.errors import UserError
from gan.shard_file import Damaged

NEEDED = ("state_dict", "players", "loops", "callbacks", "lr_schedulers", "random_states", "seed", "global_step")
PROGRESS = ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.manual_optimization.optim_step_progress")


def check_training(tree: Mapping[str, Any], trainer: Trainer) -> None:
    """Raise if it is not so. Otherwise a training would begin at step 0 in silence, or end somewhere in Lightning."""
    if "state_dict" in tree and "optimizer_states" not in tree:
        raise UserError("it has weights only, with which no training goes on; give one that has all")
    for name in NEEDED:
        need(tree, name, KINDS[name])
    loop, own = need(tree["loops"], "fit_loop", dict, "loops/"), trainer.fit_loop.state_dict()
    alike(own, loop, "loops/fit_loop")
    for name in PROGRESS:
        alike(own[name], need(loop, name, dict, "loops/fit_loop/"), f"loops/fit_loop/{name}", whole=True)
    loaders = need(loop, "state_dict", dict, "loops/fit_loop/").get("combined_loader", [])
    alike([], loaders, "loops/fit_loop/state_dict/combined_loader")
    _check_all((state for state in loaders if state is not None), "loops/fit_loop/state_dict/combined_loader")
    for number, state in enumerate(tree["optimizer_states"]):
        _check_optimizer(state, f"optimizer_states/{number}/")
    for number, (config, state) in enumerate(zip(trainer.lr_scheduler_configs, tree["lr_schedulers"], strict=False)):
        alike(config.scheduler.state_dict(), state, f"lr_schedulers/{number}")
    _check_all(tree["random_states"], "random_states")


def _check_optimizer(state: Any, where: str) -> None:
    _check_all([state], where)
    _check_all(need(state, "state", dict, where).values(), f"{where}state")
    groups = need(state, "param_groups", list, where)
    _check_all(groups, f"{where}param_groups")
    for group in groups:
        need(group, "params", list, f"{where}param_groups/")


def _check_all(states: Iterable[Any], where: str) -> None:
    if not all(isinstance(state, dict) for state in states):
        raise Damaged(f"values.pt is damaged: '{where.removesuffix('/')}' has what is not a dict")
