"""Of which kind the parts of a checkpoint's tree must be. So nothing else reaches torch and Lightning."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from gan.files.tensors import Damaged

KINDS: dict[str, type] = {
    "state_dict": dict,
    "players": dict,
    "left_out": dict,
    "files": dict,
    "hyper_parameters": dict,
    "callbacks": dict,
    "loops": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "random_states": list,
    "attributes": list,
    "global_step": int,
    "epoch": int,
    "seed": int,
    "game": str,
}
PLAYER: dict[str, type] = {"ema_updates": int, "skipped": int}
FILE: dict[str, type] = {"path": str, "sha256": str, "names": list}


def check_kinds(tree: Mapping[str, Any]) -> None:
    """Raise if a part that is there is not of its kind. Parts that are not known here may be anything."""
    for name in KINDS.keys() & tree.keys():
        need(tree, name, KINDS[name])
    for player in tree.get("players", ()):
        state, where = need(tree["players"], player, dict, "players/"), f"players/{player}/"
        for name in PLAYER.keys() & state.keys():
            need(state, name, PLAYER[name], where)
        for name in ("ema", "loss_scale"):
            if state.get(name) is not None:
                need(state, name, dict, where)
    for player in tree.get("files", ()):
        noted = need(tree["files"], player, dict, "files/")
        for name, kind in FILE.items():
            need(noted, name, kind, f"files/{player}/")
    for name in tree.get("left_out", ()):
        noted = need(tree["left_out"], name, tuple, "left_out/")
        if [*map(type, noted)] != [torch.dtype, int]:
            raise _other(f"left_out/{name}", "a dtype and a checksum")


def need(tree: Mapping[Any, Any], name: Any, kind: type, where: str = "") -> Any:
    """A part of the tree. Raise if it is not there, or not of this kind."""
    if name not in tree:
        raise Damaged(f"values.pt is damaged: it has no '{where}{name}'")
    if not isinstance(tree[name], kind):
        raise _other(f"{where}{name}", f"of kind {kind.__name__}")
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
                raise Damaged(f"values.pt is damaged: it has no '{key}/{name}'")
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
    return Damaged(f"values.pt is damaged: '{key}' is not {kind}")
