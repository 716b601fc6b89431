"""The files of a checkpoint: what is in them, and whether it is what was written.

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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from gan.files.disk import regular
from gan.files.errors import UserError, reason
from gan.files.tensors import CHUNK, Damaged, Digest, SavedPiece, crc32, kind_of, saved_pieces

VALUES, DIGESTS = "values.pt", "digests.json"
SHARDS = "*.safetensors"
PART = ".part"  # the ending of a checkpoint that is not complete
FORMAT = 2
UNCHECKED = 1  # the format without checksums
# Limits for values.pt: how deep it may be nested; how many values, and how many bytes in a tensor, it may have beyond
# what the size of its file allows.
DEPTH, MANY, HUGE = 200, 10**6, 2**30


def replaced(path: Path) -> Path:
    """The name of an older checkpoint while a newer one takes its place. It can be loaded under this name."""
    return path.with_name(f"{path.stem}.replaced{path.suffix}")


def identity_of(path: Path) -> tuple[int, int]:
    """Device and inode: another directory with the same name has others."""
    found = path.stat()
    return found.st_dev, found.st_ino


def read_files(path: Path) -> tuple[dict[str, Any], dict[str, list[SavedPiece]]]:
    """What values.pt holds, and by the names of tensors their pieces in the other files. No tensor is read."""
    _check_files(path)
    digests = _digests(path)
    saved = _values(path, digests)
    if digests is None and saved["format"] != UNCHECKED:
        raise Damaged(f"{DIGESTS} is missing")
    pieces: dict[str, list[SavedPiece]] = defaultdict(list)
    for file in _shards(path, digests):
        for piece in saved_pieces(file, digests and digests[file.name]):
            pieces[piece.key].append(piece)
    return saved, pieces


def _identity_now(path: Path) -> tuple[int, int] | None:
    try:
        return identity_of(path)
    except OSError:
        return None


def _check_files(path: Path) -> None:
    """Raise if one of its files is not a plain file: reading a named pipe would wait for a writer."""
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
        content = file.read_text("utf-8")
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


def check_whole(name: str, shape: torch.Size, dtype: torch.dtype, pieces: Collection[SavedPiece]) -> None:
    """Raise if these pieces are not the whole tensor, once. So no shape claims more than the files have."""
    stop = 0
    for piece in pieces:
        if piece.kind != kind_of(dtype) or piece.nbytes != piece.count * dtype.itemsize:
            raise Damaged(f"{piece.file.name} is damaged: '{name}' in it does not hold numbers of {dtype}")
        stop = piece.stop if piece.start == stop else -1
    if stop != math.prod(shape):
        raise Damaged(f"'{name}' is missing or not whole; has a file been removed?")
    torch.empty(shape, dtype=dtype, device="meta")  # torch refuses what is no shape


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
    if identity is not None and (now := _identity_now(path)) != identity:
        change = "removed meanwhile" if now is None else "replaced by a newer one meanwhile; try again"
        raise UserError(f"{what}: it was {change}") from failure
    if failure is not None:
        damaged = isinstance(failure, Damaged | FileNotFoundError) or getattr(failure, "errno", None) == errno.EIO
        raise (Damaged if damaged else UserError)(f"{what}: {reason(failure)}") from failure
