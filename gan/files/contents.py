"""Of which kind the parts of a checkpoint's tree must be. So nothing else reaches torch and Lightning."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gan.files.errors import Damaged
from gan.files.values import VALUES

# By their places, in which * stands for each name or number. A part is checked if what it is in is there, and must be
# there too unless its place ends in a question mark. Parts that are not known here may be anything.
KINDS: dict[str, type | tuple[type, ...]] = {
    "game?": str,
    "state_dict?": dict,
    "players?": dict,
    "players/*": dict,
    "players/*/ema?": (dict, type(None)),
    "players/*/loss_scale?": (dict, type(None)),
    "players/*/ema_updates?": int,
    "players/*/skipped?": int,
    "left_out?": dict,
    "left_out/*": tuple,
    "left_out/*/0": torch.dtype,
    "left_out/*/1": int,
    "files?": dict,
    "files/*": dict,
    "files/*/path": str,
    "files/*/sha256": str,
    "files/*/names": list,
    "hyper_parameters?": dict,
    "callbacks?": dict,
    "loops?": dict,
    "optimizer_states?": list,
    "optimizer_states/*": dict,
    "optimizer_states/*/state": dict,
    "optimizer_states/*/state/*": dict,
    "optimizer_states/*/param_groups": list,
    "optimizer_states/*/param_groups/*": dict,
    "optimizer_states/*/param_groups/*/params": list,
    "optimizer_states/*/types?": dict,
    "optimizer_states/*/types/*": list,
    "optimizer_states/*/made?": dict,
    "optimizer_states/*/made/optimizer": str,
    "optimizer_states/*/made/groups": list,
    "optimizer_states/*/made/groups/*": dict,
    "optimizer_states/*/made/schedule": (str, type(None)),
    "optimizer_states/*/made/state": dict,
    "lr_schedulers?": list,
    "random_states?": list,
    "random_states/*": dict,
    "attributes?": list,
    "attributes/*": dict,
    "global_step?": int,
    "epoch?": int,
    "seed?": int,
}
# What a training needs beside.
PROGRESS = ("epoch_progress", "epoch_loop.batch_progress", "epoch_loop.manual_optimization.optim_step_progress")
LOADERS = "loops/fit_loop/state_dict/combined_loader"
TRAINING: dict[str, type | tuple[type, ...]] = {
    "state_dict": dict,
    "players": dict,
    "callbacks": dict,
    "loops": dict,
    "loops/fit_loop": dict,
    **{f"loops/fit_loop/{name}": dict for name in PROGRESS},
    "loops/fit_loop/state_dict": dict,
    f"{LOADERS}?": list,
    f"{LOADERS}/*": (dict, type(None)),
    "lr_schedulers": list,
    "random_states": list,
    "random_states/0": dict,
    "random_states/*/accelerator": dict,
    "random_states/*/accelerator/*": Tensor,
    "global_step": int,
    "seed": int,
}


def check_kinds(tree: Mapping[str, Any], kinds: Mapping[str, type | tuple[type, ...]] = KINDS) -> None:
    """Raise if a part is not of its kind, or is missing."""
    for place, kind in kinds.items():
        *outer, name = place.removesuffix("?").split("/")
        for where, inside in _parts(tree, outer):
            for each in _names(inside, name):
                if not place.endswith("?") or _has(inside, each):
                    need(inside, each, kind, where)


def _parts(tree: Any, place: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The parts at a place that are there, and where that is."""
    if not place:
        yield "", tree
        return
    for where, inside in _parts(tree, place[:-1]):
        yield from ((f"{where}{each}/", inside[each]) for each in _names(inside, place[-1]) if _has(inside, each))


def _names(inside: Any, name: str) -> list[Any]:
    if name == "*":
        return list(inside) if isinstance(inside, Mapping) else list(range(len(inside or ())))
    return [name if isinstance(inside, Mapping) else int(name)]


def _has(inside: Any, name: Any) -> bool:
    return name in inside if isinstance(inside, Mapping) else name < len(inside)


def need(tree: Any, name: Any, kind: type | tuple[type, ...], where: str = "") -> Any:
    """A part of the tree. Raise if it is not there, or not of this kind."""
    if not _has(tree, name):
        raise Damaged(f"{VALUES} is damaged: it has no '{where}{name}'")
    if not isinstance(tree[name], kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        raise _other(f"{where}{name}", f"of kind {' or '.join(each.__name__ for each in kinds)}")
    return tree[name]


def alike(own: Any, saved: Any, key: str, whole: bool = False) -> None:
    """Raise if what is saved is not of the kind that this training has there itself.

    Dicts are compared key by key. `whole`: it must have all keys. Where this training has None, it may be anything.
    """
    if isinstance(own, dict):
        if not isinstance(saved, dict):
            raise _other(key, "a dict")
        for name, value in own.items():
            if name in saved:
                alike(value, saved[name], f"{key}/{name}", whole)
            elif whole:
                raise Damaged(f"{VALUES} is damaged: it has no '{key}/{name}'")
    elif isinstance(own, int | float) and not isinstance(saved, int | float):
        raise _other(key, "a number")
    elif isinstance(own, str) and not isinstance(saved, str):
        raise _other(key, "a text")
    elif isinstance(own, list | tuple) and not isinstance(saved, list | tuple):
        raise _other(key, "a list")


def numbers(values: Iterable[Any], key: str) -> None:
    """Raise if one of these is no number."""
    if not all(isinstance(value, int | float) for value in values):
        raise _other(key, "made of numbers")


def _other(key: str, kind: str) -> Damaged:
    return Damaged(f"{VALUES} is damaged: '{key}' is not {kind}")
