"""Reads a checkpoint, whatever number of ranks wrote it. strategies/checkpoint/ writes it.

    step-000123.ckpt/
        shard-00001-model-00001-of-00001.safetensors     ranges of flat tensors, written by the first rank
        shard-00002-model-00001-of-00001.safetensors     the same, written by the second rank
        values.pt                                        everything else, and where in the tree the tensors belong
        digests.json                                     their lengths, and checksums of values.pt and headers

A checkpoint is a tree of dicts. When it is saved, the players' tensors in it are `Share`s. When it is loaded, they are
`SavedTensor`s. These are read later, and only the ranges that are needed. Loading never runs code: safetensors files
contain only numbers, and values.pt is read by a weights-only `torch.load`. checkpoint_files.py opens the files, and
checks what they claim.
"""

import os
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gan.files.checkpoint_files import PART, VALUES, check_whole, failing, identity_of, read_files, replaced
from gan.files.contents import check_kinds, need
from gan.files.errors import UserError
from gan.files.tensors import Damaged, SavedPiece

AT_A_TIME = 64  # chunks that a thread checks

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
    pieces: tuple[SavedPiece, ...] = field(compare=False, repr=False)  # in order; together they are all of it

    def empty(self) -> Tensor:
        """Memory for the whole tensor."""
        return torch.empty(self.shape, dtype=self.dtype)


def load(path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
    """A checkpoint's tree, with a `SavedTensor` in place of each tensor of a player.

    `weights_only` is Lightning's word. False would run code, and is refused.
    """
    if weights_only is False:
        raise UserError(
            f"loading {path} never runs code; leave weights_only=False out. For classes of your own type "
            f"torch.serialization.add_safe_globals([TheClass]) in your program"
        )
    return _opened(Path(path))[0]


def check(path: Path) -> None:
    """Read all of a checkpoint, and raise `Damaged` if a byte is not as it was written. It keeps nothing of it.

    Of format 1, which has no checksums, only the headers and values.pt are read.
    """
    _, pieces = _opened(path)
    tasks = ((each, first) for each in pieces if each.checksums for first in range(0, each.chunks, AT_A_TIME))
    with failing(path), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(lambda task: task[0].check(task[1], task[1] + AT_A_TIME), tasks):
            pass


def _opened(path: Path) -> tuple[dict[str, Any], list[SavedPiece]]:
    """The tree, and all pieces of tensors in the files."""
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
        raise UserError(f"no checkpoint at {path}; {there}")
    identity = identity_of(path)
    with failing(path, identity):
        saved, pieces = read_files(path)
        try:
            tree = saved["values"]
            for name, (key, shape, dtype) in saved["tensors"].items():
                own = tuple(sorted(pieces.get(name, ()), key=lambda piece: (piece.start, piece.stop)))
                shape = torch.Size(shape)
                check_whole(name, shape, dtype, own)
                _insert(tree, key, SavedTensor(path, identity, name, shape, dtype, own))
            check_kinds(tree)
        except UserError:
            raise
        except Exception as error:
            raise Damaged(f"{VALUES} is damaged: what it says of tensors is not what checkpoints say") from error
        return tree, [piece for own in pieces.values() for piece in own]


def _insert(tree: Any, key: Key, saved: SavedTensor) -> None:
    for name in key[:-1]:
        tree = tree[name] if isinstance(tree, list) else tree.setdefault(name, {})
    tree[key[-1]] = saved


def read(wanted: Mapping[SavedTensor, Share]) -> None:
    """Fill shares with the saved values. Only the MiBs that these shares lie in are read from the files."""
    for saved, share in wanted.items():
        if saved.shape != share.shape:
            raise Damaged(
                f"{saved.source} is damaged, or of other networks: '{saved.key}' has shape {tuple(saved.shape)}, and "
                f"{tuple(share.shape)} is needed"
            )
    for path, identity in dict.fromkeys((saved.source, saved.identity) for saved in wanted):
        with failing(path, identity):
            _read({saved: share for saved, share in wanted.items() if saved.source == path})


def _read(wanted: Mapping[SavedTensor, Share]) -> None:
    # A tensor that is not contiguous has no flat view, so a copy of it is filled first.
    filled = {saved: share.tensor.detach().contiguous() for saved, share in wanted.items()}
    files: dict[Path, list[tuple[SavedPiece, SavedTensor]]] = defaultdict(list)
    for saved, share in wanted.items():
        for piece in saved.pieces:
            if max(piece.start, share.start) < min(piece.stop, share.stop):
                files[piece.file].append((piece, saved))
    for path, pieces in files.items():
        with path.open("rb", buffering=0) as file:
            for piece, saved in sorted(pieces, key=lambda pair: pair[0].place):
                share = wanted[saved]
                first, last = max(piece.start, share.start), min(piece.stop, share.stop)
                room = filled[saved].view(-1)[first - share.start : last - share.start]
                piece.read(file, first, last, room, saved.dtype)
    for saved, share in wanted.items():
        if not share.tensor.is_contiguous():
            share.tensor.detach().copy_(filled[saved])


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


def averages_of(saved: Mapping[str, Any], player: str) -> dict[str, SavedTensor] | None:
    """The moving average of a player's weights in a checkpoint, if it has one."""
    state, where = saved["players"][player], f"players/{player}/"
    if "ema" in state and state["ema"] is None:
        return None
    averages = need(state, "ema", dict, where)
    return {name: tensor_of(averages, name, f"{where}ema/") for name in averages}


def tensor_of(state: Mapping[str, Any], name: str, where: str) -> SavedTensor:
    """A tensor in a part of a checkpoint. Raise if it is not there, or is none."""
    return need(state, name, SavedTensor, where)


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
        if not isinstance(found[key], SavedTensor):
            raise RuntimeError(f"{key} is no tensor there")
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
