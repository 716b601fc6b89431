"""Checkpoints in tests: small ones, and those of trainings read whole and written again with something changed."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning import Callback
from torch import Tensor

from gan.files.checkpoint import Share, load, whole
from gan.files.tensors import crc32
from gan.files.values import VALUES
from strategies.checkpoint.writing import save


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """All that is in a checkpoint, with plain tensors in their places."""
    return whole(load(path))


class Saves(Callback):
    """Saves after a step, and trains on."""

    def __init__(self, path: str | Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


TRAINED = ("state_dict", "players", "optimizer_states")  # what training makes of the networks


def tensors(path: str | Path, parts: Sequence[str] = TRAINED) -> dict[str, Tensor]:
    """All tensors in these parts of a checkpoint, by where they are."""
    found: dict[str, Tensor] = {}

    def walk(node: Any, key: str) -> None:
        if isinstance(node, dict | list | tuple):
            for name, value in node.items() if isinstance(node, dict) else enumerate(node):
                walk(value, f"{key}/{name}")
        elif isinstance(node, Tensor):
            found[key] = node

    tree = read_checkpoint(path)
    walk({part: tree[part] for part in parts}, "")
    return found


def write_checkpoint(path: str | Path, tree: dict[str, Any]) -> None:
    """A checkpoint of one rank that holds this."""

    def walk(node: Any) -> Any:
        if isinstance(node, Tensor):
            return Share.whole(node)
        return {name: walk(value) for name, value in node.items()} if isinstance(node, dict) else node

    tree = dict(tree)
    for name in ("state_dict", "players"):
        tree[name] = walk(tree.get(name, {}))
    tree["optimizer_states"] = [walk(state) for state in tree.get("optimizer_states", ())]
    save(path, tree)


def numbered(number: int, size: int = 1000) -> dict[str, Any]:
    """What a checkpoint holds that has its number in each of its parts."""
    tensor = torch.full((size,), float(number))
    return {"number": number, "state": {"a": Share.whole(tensor), "b": Share.whole(-tensor)}}


def number_of(path: Path) -> int:
    """A checkpoint's number, which all of its parts must have."""
    tree = read_checkpoint(path)
    assert torch.equal(tree["state"]["a"], torch.full_like(tree["state"]["a"], float(tree["number"])))
    assert torch.equal(tree["state"]["b"], -tree["state"]["a"])
    return tree["number"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def values_of(path: Path) -> dict[str, Any]:
    """What is in a checkpoint's values.json."""
    return json.loads((path / VALUES).read_bytes())


def seal(path: Path, content: Any = None) -> None:
    """Write the checksums of a checkpoint's files as they are now, as somebody would who has changed them on purpose.

    `content` is what values.json will have beside its own, if it is changed.
    """
    content = values_of(path) if content is None else content
    if isinstance(content, dict) and isinstance(content.get("files"), dict):
        content["files"] = {file.name: crc_of_header(file) for file in sorted(path.glob("*.safetensors"))}
    seal_text(path, json.dumps(content).encode())


def seal_text(path: Path, text: bytes) -> None:
    """Write values.json with this in it, and its checksum in front."""
    rest = text[1:] if not text.startswith(b'{"crc32"') else text[len(b'{"crc32": "........", ') :]
    (path / VALUES).write_bytes(b'{"crc32": "' + crc32(rest).encode() + b'", ' + rest)


def crc_of_header(file: Path) -> str:
    content = file.read_bytes()
    return crc32(content[: 8 + int.from_bytes(content[:8], "little")])


def damage(path: Path) -> None:
    """Flip a bit of a checkpoint's last tensor."""
    file = max(path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 4
    file.write_bytes(content)


class Malice:
    """Where pickle loads it, there is a folder of this name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)
