"""Reads a checkpoint, whatever number of ranks wrote it. strategies/checkpoint/ writes it.

    step-000123.ckpt/
        shard-00001-model-00001-of-00001.safetensors     ranges of flat tensors, written by the first rank
        shard-00002-model-00001-of-00001.safetensors     the same, written by the second rank
        values.pt                                        everything else, and where in the tree the tensors belong
        digests.json                                     lengths and checksums of these files, written last

A checkpoint is a tree of dicts. When it is saved, the players' tensors in it are `Share`s. When it is loaded, they are
`SavedTensor`s. These are read later, and only the ranges that are needed. Loading never runs code: safetensors files
contain only numbers, and values.pt is read by a weights-only `torch.load`.

[Note: damage]
What is read is compared with the checksums that were made of it when it was written. digests.json has those of
values.pt and of the header of each shard file; each header has those of its elements (see shard_file.py). So a rank
checks all that it uses, and reads no more for that. `check` reads all. What does not fit is `Damaged`, and the message
names the file. A checkpoint of format 1 has no checksums; it is read as it is.

What a file claims is compared with the bytes that are there before memory is taken for it.
"""

import errno
import json
import math
import os
import pickle
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from gan.contents import check_kinds, need
from gan.errors import UserError
from gan.files import regular
from gan.shard_file import CHUNK, Damaged, Digest, SavedPiece, crc32, kind_of, saved_pieces

VALUES, DIGESTS = "values.pt", "digests.json"
SHARDS = "*.safetensors"
PART = ".part"  # the ending of a checkpoint that is not complete
FORMAT = 2
UNCHECKED = 1  # the format without checksums
DEPTH, MANY, HUGE = 200, 10**6, 2**30  # what values may be: so deep; so many and so many bytes, beside what is saved
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


def replaced(path: Path) -> Path:
    """The name of an older checkpoint while a newer one takes its place. It can be loaded under this name."""
    return path.with_name(f"{path.stem}.replaced{path.suffix}")


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
    """Read all of a checkpoint, and raise `Damaged` if a byte is not as it was written. It loads no tensor.

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
    identity = _identity(path)
    with failing(path, identity):
        _check_files(path)
        digests = _digests(path)
        saved = _values(path, digests)
        if digests is None and saved["format"] != UNCHECKED:
            raise Damaged(f"{DIGESTS} is missing")
        pieces: dict[str, list[SavedPiece]] = defaultdict(list)
        for file in _shards(path, digests):
            for piece in saved_pieces(file, digests and digests[file.name]):
                pieces[piece.key].append(piece)
        try:
            tree = saved["values"]
            for name, (key, shape, dtype) in saved["tensors"].items():
                own = tuple(sorted(pieces.get(name, ()), key=lambda piece: (piece.start, piece.stop)))
                shape = torch.Size(shape)
                _check_whole(name, shape, dtype, own)
                _insert(tree, key, SavedTensor(path, identity, name, shape, dtype, own))
            check_kinds(tree)
        except UserError:
            raise
        except Exception as error:
            raise Damaged(f"{VALUES} is damaged: what it says of tensors is not what checkpoints say") from error
        return tree, [piece for own in pieces.values() for piece in own]


def _check_files(path: Path) -> None:
    """Raise if a file of it is none: a named pipe would wait for a writer."""
    for file in (path / VALUES, path / DIGESTS, *path.glob(SHARDS)):
        try:
            if os.path.lexists(file):
                regular(file)
        except OSError as error:
            raise Damaged(reason(error)) from error


def _digests(path: Path) -> dict[str, Digest] | None:
    """The lengths and checksums of the files, by their names. None if there are none, as in format 1."""
    file = path / DIGESTS
    if not file.is_file():
        if not (path / VALUES).is_file():
            raise UserError(f"it has no {VALUES}; is it a run's folder?")
        return None
    try:
        content = file.read_text()
        found = {name: Digest(*digest) for name, digest in json.loads(content)["files"].items()}
        if content != digests_text(found):
            raise ValueError
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{DIGESTS} is damaged") from error


def digests_text(files: Mapping[str, Digest]) -> str:
    """The content of digests.json. It has a checksum of its own."""
    return json.dumps({"files": files, "crc32": crc32(json.dumps(files).encode())})


def _shards(path: Path, digests: Mapping[str, Digest] | None) -> list[Path]:
    files = sorted(file for file in path.glob(SHARDS) if file.is_file())
    if digests is not None:
        wanted = digests.keys() - {VALUES}
        there = {file.name for file in files}
        for name in sorted(wanted - there):
            raise Damaged(f"{name} is missing")
        for name in sorted(there - wanted):
            raise Damaged(f"{name} is no file of it; remove that file")
    return files


def _values(path: Path, digests: Mapping[str, Digest] | None) -> dict[str, Any]:
    """What is in values.pt, after a check that it is as it was written, and that it is safe to look at."""
    file = path / VALUES
    if not file.is_file():
        raise Damaged(f"{VALUES} is missing")
    if digests is not None:
        if VALUES not in digests:
            raise Damaged(f"{DIGESTS} is damaged: it has no {VALUES}")
        if digest_of(file) != digests[VALUES]:
            raise Damaged(f"{VALUES} is damaged: it is not what was written")
    try:
        _check_archive(file)
        saved = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, UserError):
        raise
    except Exception as error:
        if isinstance(error, pickle.UnpicklingError) and (kinds := _kinds(file)):
            classes = ", ".join(kind.rpartition(".")[2] for kind in kinds)
            raise UserError(
                f"it holds {', '.join(kinds)}, which loading would run as code; if these are classes of your own, "
                f"type torch.serialization.add_safe_globals([{classes}]) in your program"
            ) from error
        raise Damaged(f"{VALUES} is damaged: it holds no values") from error
    if not isinstance(saved, dict) or type(saved.get("format")) is not int:
        raise Damaged(f"{VALUES} is damaged: it is not of a checkpoint")
    if saved["format"] not in (UNCHECKED, FORMAT):
        raise UserError(f"it has format {saved['format']}, and this version reads {UNCHECKED} and {FORMAT}")
    if not all(isinstance(saved.get(name), dict) for name in ("values", "tensors")):
        raise Damaged(f"{VALUES} is damaged: it has no values and tensors")
    try:
        _check_values(saved, file.stat().st_size)
    except ValueError as error:
        raise Damaged(f"{VALUES} is damaged: {error}") from error
    return saved


def digest_of(file: Path) -> Digest:
    """The length and the crc32 of a whole file. It is read in small parts."""
    length = found = 0
    with file.open("rb", buffering=0) as content:
        while chunk := content.read(CHUNK):
            length, found = length + len(chunk), zlib.crc32(chunk, found)
    return Digest(length, f"{found:08x}")


def _kinds(file: Path) -> list[str]:
    try:
        return sorted(get_unsafe_globals_in_checkpoint(file))
    except Exception:  # noqa: BLE001 - the file may be anything
        return []


def _check_archive(file: Path) -> None:
    """Raise if torch.load would take more memory for its members than the file has bytes."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    if any(each.compress_type != zipfile.ZIP_STORED for each in members):
        raise Damaged(f"{VALUES} is damaged: it is compressed")
    if sum(each.file_size for each in members) > file.stat().st_size:
        raise Damaged(f"{VALUES} is damaged: it claims more than it has")


def _check_values(values: Any, length: int) -> None:
    """Raise if to walk through the values would take for ever, or if a tensor claims memory that nobody has saved.

    A pickle may hold one list in many places, and a few such lists of each other make a tree of any size. It may also
    hold one number as a tensor of any size.
    """
    sizes: dict[int, int] = {}
    most = 10 * length + MANY

    def size(node: Any, depth: int) -> int:
        if isinstance(node, Tensor) and node.layout == torch.strided and node.nbytes > length + HUGE:
            raise ValueError("a tensor in it claims more than it has")
        if not isinstance(node, dict | list | tuple):
            return 1
        if id(node) not in sizes and depth < DEPTH:
            sizes[id(node)] = most  # until its size is known: it must not hold itself
            inside = node.values() if isinstance(node, dict) else node
            sizes[id(node)] = 1 + sum(size(each, depth + 1) for each in inside)
        if sizes.get(id(node), most) >= most:
            raise ValueError("its values are nested without end")
        return sizes[id(node)]

    size(values, 0)


def _check_whole(name: str, shape: torch.Size, dtype: torch.dtype, pieces: Collection[SavedPiece]) -> None:
    """Raise if these pieces are not the whole tensor, once. So no shape claims more than the files have."""
    stop = 0
    for piece in pieces:
        if piece.kind != kind_of(dtype) or piece.nbytes != piece.count * dtype.itemsize:
            raise Damaged(f"{piece.file.name} is damaged: '{name}' in it does not hold numbers of {dtype}")
        stop = piece.stop if piece.start == stop else -1
    if stop != math.prod(shape):
        raise Damaged(f"'{name}' is missing or not whole; has a file been removed?")
    torch.empty(shape, dtype=dtype, device="meta")  # torch refuses what is no shape


def _insert(tree: Any, key: Key, saved: SavedTensor) -> None:
    for name in key[:-1]:
        tree = tree[name] if isinstance(tree, list) else tree.setdefault(name, {})
    tree[key[-1]] = saved


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


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


@contextmanager
def failing(path: Path, identity: tuple[int, int] | None = None) -> Iterator[None]:
    """Turn failures of disks and files into an error that names the checkpoint. Our own mistakes are not changed.

    If another directory has got the checkpoint's name since `identity`, that is the reason, also if nothing failed.
    """
    what = f"{path} cannot be read as a checkpoint"
    try:
        yield
        failure: Exception | None = None
    except (OSError, UserError) as error:
        failure = error
    if identity is not None and (not path.exists() or _identity(path) != identity):
        raise UserError(f"{what}: it was replaced by a newer one meanwhile; try again") from failure
    if failure is not None:
        damaged = isinstance(failure, Damaged | FileNotFoundError) or getattr(failure, "errno", None) == errno.EIO
        raise (Damaged if damaged else UserError)(f"{what}: {reason(failure)}") from failure


def reason(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
