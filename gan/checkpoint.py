"""Reads a checkpoint, whatever number of ranks wrote it. strategies/checkpoint/ writes it.

    step-000123.ckpt/
        shard-00001-model-00001-of-00001.safetensors     ranges of flat tensors, written by the first rank
        shard-00002-model-00001-of-00001.safetensors     the same, written by the second rank
        values.pt                                        everything else, and where in the tree the tensors belong

A checkpoint is a tree of dicts. When it is saved, the players' tensors in it are `Share`s. When it is loaded, they are
`SavedTensor`s. These are read later, and only the ranges that are needed. Loading never runs code: safetensors files
contain only numbers, and values.pt is read by a weights-only `torch.load`.
"""

import json
import pickle
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from gan.errors import UserError
from gan.files import regular

VALUES = "values.pt"
PART = ".part"  # the ending of a checkpoint that is not complete
FORMAT = 1
STARTS, START = "DCP_SHARDING_INFO", "saved_offsets"  # the names in torch's distributed checkpoint

Key = tuple[str | int, ...]  # the path of a value in the tree
Checksum = tuple[torch.dtype, int]


@dataclass(frozen=True)
class Share:
    """One rank's part of a tensor: a range of the elements of the flat tensor.

    `tensor` has these elements. The range begins at element `start` of the whole tensor, which has the shape `shape`.
    """

    tensor: Tensor
    shape: torch.Size
    start: int = 0

    @classmethod
    def whole(cls, tensor: Tensor) -> "Share":
        return cls(tensor.detach(), tensor.shape)

    @property
    def stop(self) -> int:
        return self.start + self.tensor.numel()


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint, not read yet."""

    source: Path
    identity: tuple[int, int]  # device and inode of the directory, to notice if another one gets its name
    key: str
    shape: torch.Size
    dtype: torch.dtype

    def empty(self) -> Tensor:
        """Memory for the whole tensor."""
        return torch.empty(self.shape, dtype=self.dtype)


def replaced(path: Path) -> Path:
    """The name of an older checkpoint while a newer one takes its place. It can be loaded under this name."""
    return path.with_name(f"{path.stem}.replaced{path.suffix}")


def load(path: str | Path, weights_only: bool = True) -> dict[str, Any]:
    """A checkpoint's tree, with a `SavedTensor` in place of each tensor of a player."""
    path = Path(path)
    if path.name.endswith(PART):
        raise UserError(f"{path} is not complete; give a checkpoint without {PART}")
    if path.is_file():
        raise UserError(
            f"{path} cannot be read as a checkpoint: it is one file, and checkpoints are directories; "
            f"those of earlier versions are not read any more"
        )
    if not path.is_dir():
        older = replaced(path)
        there = f"{older.name} is there, the one before" if older.is_dir() else "look in the run's checkpoints/ folder"
        raise UserError(f"no checkpoint at {path}; {there}, or type --resume auto")
    if not (path / VALUES).exists():
        raise UserError(f"{path} cannot be read as a checkpoint: it has no {VALUES}; is it a run's folder?")
    with _failing(path, Exception):
        identity = _identity(path)
        regular(path / VALUES)
        try:
            saved = torch.load(path / VALUES, map_location="cpu", weights_only=weights_only)
        except pickle.UnpicklingError as error:
            kinds = get_unsafe_globals_in_checkpoint(path / VALUES)
            if not kinds:
                raise
            raise UserError(
                f"it holds {', '.join(sorted(kinds))}, which loading would run as code; if you trust it, type "
                f"weights_only=False, in trainer.fit(...) or load_from_checkpoint(...)"
            ) from error
        if saved["format"] != FORMAT:
            raise UserError(f"it has format {saved['format']}, and this version reads {FORMAT}")
        tree = saved["values"]
        for name, (key, shape, dtype) in saved["tensors"].items():
            _insert(tree, key, SavedTensor(path, identity, name, torch.Size(shape), dtype))
        return tree


def _insert(tree: Any, key: Key, saved: SavedTensor) -> None:
    for name in key[:-1]:
        tree = tree[name] if isinstance(tree, list) else tree.setdefault(name, {})
    tree[key[-1]] = saved


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def read(wanted: Mapping[SavedTensor, Share]) -> None:
    """Fill shares with the saved values. Only the ranges of these shares are read from the files."""
    assert all(saved.shape == share.shape for saved, share in wanted.items())
    for path, identity in dict.fromkeys((saved.source, saved.identity) for saved in wanted):
        with _failing(path):
            _read(path, {saved.key: share for saved, share in wanted.items() if saved.source == path})
            if _identity(path) != identity:
                raise UserError("it was replaced by a newer one meanwhile; try again")


def _read(path: Path, wanted: Mapping[str, Share]) -> None:
    wanted = {key: share for key, share in wanted.items() if share.tensor.numel()}
    if not wanted:
        return
    # A tensor that is not contiguous has no flat view, so a copy of it is filled first.
    filled = {key: share.tensor.detach().contiguous() for key, share in wanted.items()}
    there = dict.fromkeys(wanted, 0)  # how many elements of each tensor the files hold
    for file in sorted(path.glob("*.safetensors")):
        regular(file)
        with safe_open(file, framework="pt") as tensors:
            starts = json.loads((tensors.metadata() or {}).get(STARTS, "{}"))
            for key in wanted.keys() & starts.keys():
                share, saved, start = wanted[key], tensors.get_slice(key), starts[key][START][0]
                stop = start + saved.get_shape()[0]
                there[key] += stop - start
                first, last = max(start, share.start), min(stop, share.stop)
                if first < last:
                    room = filled[key].view(-1)[first - share.start : last - share.start]
                    room.copy_(saved[first - start : last - start])
    for key, share in wanted.items():
        if there[key] != share.shape.numel():
            raise UserError(f"'{key}' is missing or not whole; has a file been removed?")
        if not share.tensor.is_contiguous():
            share.tensor.detach().copy_(filled[key])


def whole(tree: Any) -> Any:
    """The tree with every tensor read into the memory of the CPU."""
    found: dict[SavedTensor, Share] = {}

    def walk(node: Any) -> Any:
        if isinstance(node, SavedTensor):
            return found.setdefault(node, Share.whole(node.empty())).tensor
        if isinstance(node, dict):
            return {name: walk(value) for name, value in node.items()}
        return [walk(value) for value in node] if type(node) is list else node

    tree = walk(tree)
    read(found)
    return tree


def load_module_state(
    module: nn.Module,
    saved: Mapping[str, Any],
    shares: Mapping[Tensor, Share | None] | None = None,
    strict: bool = True,
    left_out: Collection[str] = (),
) -> None:
    """Load a module's state. If it does not fit, raises a RuntimeError that says what, as torch does.

    The parameters named in `left_out` may be missing; they stay as they are.
    `shares` has this rank's share of each sharded parameter; None if the rank has nothing of it. Shares are read
    directly into their memory. Everything else goes through torch's own `load_state_dict`. A tensor that has two names
    in the module is saved under only one of them.
    """
    shares = shares or {}
    own = module.state_dict(keep_vars=True)
    names = {id(value): key for key, value in own.items() if key in saved}
    found = {key: saved[names[id(value)]] for key, value in own.items() if id(value) in names}
    sharded = {key: own[key] for key in found if isinstance(own[key], nn.Parameter) and own[key] in shares}
    for key, weight in sharded.items():
        if found[key].shape != weight.shape:
            raise RuntimeError(f"size mismatch for {key}: {tuple(found[key].shape)} there, {tuple(weight.shape)} here")
    wanted = {found[key]: shares[weight] for key, weight in sharded.items()}
    read({there: share for there, share in wanted.items() if share is not None})

    rest = {key: value for key, value in found.items() if key not in sharded}
    rest |= {key: value for key, value in saved.items() if key not in own}
    missing, unexpected = module.load_state_dict(whole(rest), strict=False)
    unsaved = {id(own[key]) for key in left_out if key in own}
    missing = [key for key in missing if key not in sharded and id(own[key]) not in unsaved]
    if strict and (missing or unexpected):
        raise RuntimeError(f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}")


def checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> Checksum:
    """A number made of the tensor's bits, in its own dtype or in another one."""
    values = tensor.detach().to("cpu", dtype).contiguous()
    return values.dtype, zlib.crc32(values.reshape(-1).view(torch.uint8).numpy())


def check_left_out(module: nn.Module, left_out: Mapping[str, Checksum]) -> None:
    """Raise if parameters that a checkpoint leaves out do not have the values that they had when it was saved."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, noted in left_out.items():
        if name not in parameters or checksum(parameters[name], noted[0]) != noted:
            raise UserError(
                f"checkpoints leave '{name}' out, for its player has saved=False, and it does not have the values here "
                f"that it had when this one was saved; let the game's constructor make the same ones. To go on with "
                f"others, type strict=False in load_from_checkpoint(...), or game.strict_loading = False"
            )


@contextmanager
def _failing(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Turn failures of disks and files into a UserError that names the checkpoint. Our own mistakes are not changed."""
    try:
        yield
    except (OSError, SafetensorError, UserError, *kinds) as error:
        raise UserError(f"{path} cannot be read as a checkpoint: {reason(error)}") from error


def reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
