"""Reads a checkpoint, whatever number of ranks wrote it. strategies/checkpoint/ writes it.

    step-000123.ckpt/
        shard-00001-model-00001-of-00001.safetensors     ranges of flat tensors, written by the first rank
        shard-00002-model-00001-of-00001.safetensors     the same, written by the second rank
        values.json                                      everything else, and where in the tree the tensors belong

A checkpoint is a tree of dicts; strategies/checkpoint/state.py says what is in it. When it is saved, the players'
tensors in it are `Share`s. When it is loaded, they are `SavedTensor`s. These are read later, and only the ranges that
are needed. Loading never runs code: the files have numbers and JSON.

[Note: damage]
What is read is compared with the checksums that were made of it when it was written. values.json has its own, and those
of the header of each shard file; each header has those of its elements (see tensors.py). So a rank checks all that it
uses, and reads no more for that. `check` reads all. What does not fit is `Damaged`, and the message names the file.
What a file claims is compared with the bytes that are there before memory is taken for it.
"""

import ctypes
import errno
import math
import os
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from gan.files.disk import regular
from gan.files.errors import Damaged, UserError, reading, reason
from gan.files.system import cores
from gan.files.tensors import DTYPES, Piece, Share, pieces
from gan.files.values import VALUES, decode, unsealed

FORMAT = 3
FORMER = "values.pt", "digests.json"  # in place of values.json in the formats before
SHARDS = "shard-*.safetensors"
PART = ".part"  # the ending of a checkpoint that is not complete
TENSOR, SHARE = "tensor", "share"  # what stands for a tensor in values.json: it is read at once, or later

Checksum = tuple[torch.dtype, int]


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in a checkpoint, not read yet. An author's on_load_checkpoint may compute with it; then it is read."""

    source: Path
    identity: tuple[int, int] | None  # device and inode of the directory, to notice if another one gets its name
    key: str
    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[Piece, ...] = field(compare=False, repr=False)  # in order; together they are all of it

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(whole(self), name)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], _: Any, args: Any = (), named: Any = None) -> Any:
        args, named = whole((args, named or {}))
        return function(*args, **named)


def replaced(path: Path) -> Path:
    """The name of an older checkpoint while a newer one takes its place. It can be loaded under this name."""
    return path.with_name(f"{path.stem}.replaced{path.suffix}")


def load(path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
    """A checkpoint's tree, with `SavedTensor`s of players. `weights_only` is Lightning's word: False would run code."""
    if weights_only is False:
        raise UserError(f"loading {path} never runs code; leave weights_only=False out")
    return _opened(Path(path))[0]


def check(path: Path) -> None:
    """Read all of a checkpoint, and raise `Damaged` if a byte is not as it was written. It keeps nothing of it."""
    _, found = _opened(path)
    with failing(path), ThreadPoolExecutor(min(8, cores())) as pool:
        list(pool.map(Piece.check, found))


def _opened(path: Path) -> tuple[dict[str, Any], list[Piece]]:
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
        advice = f"{older.name} is there, the one before" if older.is_dir() else "look in the run's checkpoints/ folder"
        raise UserError(f"no checkpoint at {path}; {advice}")
    identity = _identity(path)
    with failing(path, identity):
        values, found = _files(path)
        by_key: dict[str, list[Piece]] = defaultdict(list)
        for piece in found:
            by_key[piece.key].append(piece)
        wanted: dict[SavedTensor, Share] = {}

        def tensor(kind: str, content: Any) -> SavedTensor | Tensor:
            key, name, shape = content
            own = tuple(sorted(by_key.pop(key, ()), key=lambda piece: (piece.start, piece.stop)))
            saved = SavedTensor(path, identity, key, torch.Size(shape), DTYPES[name], own)
            _check_whole(saved)
            if kind == TENSOR:
                return wanted.setdefault(saved, Share.whole(saved.empty())).tensor
            return {SHARE: saved}[kind]

        with reading(VALUES, "it holds what checkpoints do not hold"):
            tree = {**decode(values, tensor)}
        _read(wanted)
        return tree, found


def _files(path: Path) -> tuple[dict[str, Any], list[Piece]]:
    """The values as JSON has them, and what is in the other files. No tensor is read."""
    shards = {file.name: file for file in path.glob(SHARDS)}
    for file in (path / VALUES, *shards.values()):
        try:
            if os.path.lexists(file):
                regular(file)  # reading a named pipe would wait for a writer
        except OSError as error:
            raise Damaged(reason(error)) from error
    if not (path / VALUES).is_file():
        if (path / FORMER[0]).is_file():
            raise UserError(
                f"it was written by an earlier version of this project (format 2 or 1), and this one reads format "
                f"{FORMAT}; go on with the version that it was trained with"
            )
        raise Damaged(f"{VALUES} is missing") if shards else UserError(f"it has no {VALUES}; is it a run's folder?")
    about = unsealed((path / VALUES).read_bytes())
    if about["format"] != FORMAT:
        raise UserError(f"it has format {about['format']}, and this version reads {FORMAT}")
    for name in sorted(about["files"].keys() ^ shards.keys()):
        raise Damaged(f"{name} is no file of it; remove that file" if name in shards else f"{name} is missing")
    found = [each for name, file in sorted(shards.items()) for each in pieces(file, about["files"][name]).values()]
    return about["values"], found


def _check_whole(saved: SavedTensor) -> None:
    """Raise if its pieces are not the whole tensor, once. So no shape claims more than the files have."""
    stop = 0
    for piece in saved.pieces:
        if piece.dtype != saved.dtype:
            raise Damaged(f"{piece.file.name} is damaged: '{saved.key}' in it does not hold numbers of {saved.dtype}")
        stop = piece.stop if piece.start == stop else -1
    if stop != math.prod(saved.shape):
        raise Damaged(f"'{saved.key}' is missing or not whole; has a file been removed?")
    torch.empty(saved.shape, dtype=saved.dtype, device="meta")  # torch refuses what is no shape


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode: another directory with the same name has others."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def failing(path: Path, identity: tuple[int, int] | None = None) -> Iterator[None]:
    """Turn failures of disks and files into an error that names the checkpoint. Our own mistakes are not changed.

    If the checkpoint was removed or replaced since `identity`, that is the reason, also if nothing failed.
    """
    what = f"{path} cannot be read as a checkpoint"
    try:
        yield
        failure: Exception | None = None
    except (OSError, UserError) as error:
        failure = error
    if identity is not None and (now := _identity(path)) != identity:
        change = "removed meanwhile" if now is None else "replaced by a newer one meanwhile; try again"
        raise UserError(f"{what}: it was {change}") from failure
    if failure is not None:
        damaged = isinstance(failure, Damaged | FileNotFoundError) or getattr(failure, "errno", None) == errno.EIO
        raise (Damaged if damaged else UserError)(f"{what}: {reason(failure)}") from failure


def read(wanted: Mapping[SavedTensor, Share]) -> None:
    """Fill shares with the saved values. Only the MiBs that these shares lie in are read from the files."""
    for saved, share in wanted.items():
        if saved.shape != share.shape:
            raise misfit(saved, share.shape)
    for path, identity in dict.fromkeys((saved.source, saved.identity) for saved in wanted):
        with failing(path, identity):
            _read({saved: share for saved, share in wanted.items() if saved.source == path})


def misfit(saved: SavedTensor, shape: torch.Size) -> Damaged:
    return Damaged(
        f"{saved.source} is damaged, or of other networks: '{saved.key}' has shape {tuple(saved.shape)}, and "
        f"{tuple(shape)} is needed"
    )


def _read(wanted: Mapping[SavedTensor, Share]) -> None:
    files: dict[Path, list[tuple[Piece, SavedTensor]]] = defaultdict(list)
    for saved, share in wanted.items():
        for piece in saved.pieces:
            if max(piece.start, share.start) < min(piece.stop, share.stop):
                files[piece.file].append((piece, saved))
    with ExitStack() as stack:
        rooms = {saved: stack.enter_context(share.filled()) for saved, share in wanted.items()}
        for path, found in files.items():
            with path.open("rb", buffering=0) as file:
                for piece, saved in sorted(found, key=lambda pair: pair[0].place):
                    piece.read(file, wanted[saved], rooms[saved])


def whole(tree: Any) -> Any:
    """The tree with every tensor read into the memory of the CPU."""
    found: dict[SavedTensor, Share] = {}

    def room(saved: SavedTensor) -> Tensor:
        return found.setdefault(saved, Share.whole(saved.empty())).tensor

    tree = tree_map_only(SavedTensor, room, tree)
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
    directly into their memory. All else goes through torch's own `load_state_dict`, which sees sharded parameters
    without values. A tensor that has two names in the module is saved under only one of them.
    """
    shares = shares or {}
    _make_buffers(module, saved)
    own = module.state_dict(keep_vars=True)
    names = {id(value): key for key, value in own.items() if key in saved}
    found = {key: saved[names[id(value)]] for key, value in own.items() if id(value) in names}
    sharded = {key: own[key] for key in found if isinstance(own[key], nn.Parameter) and own[key] in shares}
    for key, weight in sharded.items():
        if not isinstance(found[key], SavedTensor | Tensor):
            raise RuntimeError(f"{key} is no tensor there")
        if found[key].shape != weight.shape:
            raise RuntimeError(f"size mismatch for {key}: {tuple(found[key].shape)} there, {tuple(weight.shape)} here")
    ours = {key: share for key, weight in sharded.items() if (share := shares[weight]) is not None}
    read({found[key]: share for key, share in ours.items() if isinstance(found[key], SavedTensor)})
    for key, share in ours.items():
        if isinstance(found[key], Tensor):  # the author's on_load_checkpoint has computed it
            with share.filled() as room:
                room.copy_(found[key].reshape(-1)[share.start : share.stop])

    rest = {key: value for key, value in found.items() if key not in sharded}
    rest |= {key: value for key, value in saved.items() if key not in own}
    state = OrderedDict(whole(rest) | {key: _on_meta(weight) for key, weight in sharded.items()})
    # The versions of modules, by which some of them know what an older file has.
    vars(state).update(getattr(own, "__dict__", {}))  # none, if the author's state_dict() returns a plain dict
    # What loads into modules, such as hooks, asks for all names.
    with aside(module, set(sharded.values()).__contains__, _on_meta):
        missing, unexpected = module.load_state_dict(state, strict=False)
    _put_apart(module, own, {key: each for key, each in state.items() if key in own and key not in sharded})
    unsaved = {id(own[key]) for key in left_out if key in own}
    # What an author's state_dict() leaves out is as the constructor has made it, unless it learns.
    learning = {key for key, weight in module.named_parameters() if weight.requires_grad}
    missing = [key for key in missing if (id(own[key]) not in unsaved if key in own else key in learning)]
    if strict and (missing or unexpected):
        first = [", ".join([*each[:3], *["..."] * (len(each) > 3)]) or "none" for each in (missing, unexpected)]
        raise RuntimeError(f"missing: {first[0]}; unexpected: {first[1]}")


def _make_buffers(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Make room for saved buffers that begin empty, or as None, and that a forward fills."""
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            there = saved.get(f"{prefix}.{name}".lstrip("."))
            begins = buffer is None or not buffer.numel()
            if begins and isinstance(there, SavedTensor | Tensor) and math.prod(there.shape):
                device = next((each.device for each in module.parameters()), None) if buffer is None else buffer.device
                owner._buffers[name] = torch.empty(there.shape, dtype=there.dtype, device=device)


def _put_apart(module: nn.Module, own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Give a buffer memory of its own, and the weight its values, if loading the buffer has overwritten the weight.

    In the spectral norm of torch 0.4, which published code still has, a buffer lies in the weight's memory until the
    first forward. If both were saved with the same values, the buffer stays there.
    """
    there = {key: each for key, each in own.items() if key in state and _has_memory(each)}
    memory = {key: each.untyped_storage()._cdata for key, each in there.items()}
    weights = {memory[key]: key for key, each in there.items() if isinstance(each, nn.Parameter)}
    for prefix, owner in module.named_modules():
        for name in owner._buffers:
            key = f"{prefix}.{name}".lstrip(".")
            weight = weights.get(memory.get(key))
            if weight and any(not torch.equal(own[each], state[each].to(own[each])) for each in (key, weight)):
                owner._buffers[name] = torch.empty_like(own[key]).copy_(state[key])
                own[weight].data.copy_(state[weight])


def _has_memory(value: Any) -> bool:
    plain = isinstance(value, Tensor) and not is_lazy(value) and value.layout == torch.strided
    return plain and not value.is_meta and value.numel() > 0


def take_format(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Let these tensors have numbers of the format of those that are saved under their names."""
    for name, tensor in own.items():
        dtype = getattr(saved.get(name), "dtype", None)
        if isinstance(tensor, Tensor) and dtype is not None and not is_lazy(tensor):
            tensor.data = tensor.data.to(dtype)


def _on_meta(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), weight.requires_grad)


@contextmanager
def aside(
    network: nn.Module, which: Callable[[Tensor], bool], instead: Callable[[Tensor], Tensor | None] = lambda _: None
) -> Iterator[None]:
    """Inside the `with`, a network is without some of its tensors: code that moves or sends all of them skips these."""
    taken = [
        (module, name, tensor)
        for module in network.modules()
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and which(tensor)
    ]
    try:
        for module, name, tensor in taken:
            setattr(module, name, instead(tensor))  # torch's RNNs change their own lists then, too
        yield
    finally:
        for module, name, tensor in taken:
            setattr(module, name, tensor)


def checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> Checksum:
    """A number made of the tensor's bits, in its own dtype or in another one."""
    plain = tensor.detach().as_subclass(Tensor)  # an author's subclass may have a `to` of its own
    values = plain.resolve_conj().resolve_neg().to("cpu", dtype).contiguous()
    # Not by `numpy()`: after that torch does not resize the tensor any more, as published code does with its noise.
    return values.dtype, zlib.crc32((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))


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
