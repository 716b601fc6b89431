"""Checkpoints in tests: read whole, and written again with something in them changed."""

from pathlib import Path
from typing import Any

from torch import Tensor

from strategies.checkpoint import directory as checkpoint
from strategies.sharding.share import Share


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """All that is in a checkpoint, with plain tensors in their places."""
    return checkpoint.whole(checkpoint.load(path))


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
    checkpoint.save(path, tree)


def without_optimizers(path: str | Path, to: Path) -> str:
    """A control: the same checkpoint, in which the optimizers have forgotten everything."""
    tree = read_checkpoint(path)
    write_checkpoint(to, {**tree, "optimizer_states": [{**state, "state": {}} for state in tree["optimizer_states"]]})
    return str(to)
