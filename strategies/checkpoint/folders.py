"""A checkpoint's folder is there whole or not at all.

[Note: complete or absent]
All files are written into `last.ckpt.part` and flushed. Then the first rank renames it, once all ranks have finished.
Nothing is loaded under the ending `.part`, so a killed process leaves no checkpoint that looks whole and is not. Where
a `last.ckpt` is there already, that one is first renamed to `last.replaced.ckpt`, and removed at the end. A kill
between the two renames leaves it under that name. It can be loaded, and the error of a load of `last.ckpt` names it.
A checkpoint that is removed is first renamed to `.part`.

A process that saves holds a shared lock on the folder around, which the system releases when the process ends. Before
it writes, it asks for an exclusive lock. If it gets one, no other process is writing there: every `.part` is a
leftover, and is removed. On a file system without locks only leftovers of the same name are removed.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gan.checkpoint import PART, VALUES, replaced
from gan.errors import UserError


def part_of(path: Path) -> Path:
    return path.with_name(path.name + PART)


@contextmanager
def new_part(path: Path) -> Iterator[None]:
    """An empty folder to write a checkpoint in. After a failure it is gone."""
    part = part_of(path)
    _refuse_other(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(part.parent, os.O_RDONLY)
    try:
        _remove_leftovers(path, lock)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_SH)
        try:
            part.mkdir()
        except FileExistsError:
            raise UserError(
                f"{part} is in the way: another process is writing it, or it is no checkpoint; remove it"
            ) from None
        try:
            yield
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _remove_leftovers(path: Path, lock: int) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        leftovers = list(path.parent.glob(f"*{path.suffix}{PART}"))
    except BlockingIOError:  # a living process is writing in this folder
        return
    except OSError:  # a file system without locks
        leftovers = [part_of(path)]
    for part in leftovers:
        with suppress(FileNotFoundError):
            if _is_ours(part):
                shutil.rmtree(part)


def check_seen(part: Path) -> None:
    """The other ranks must see the folder that the first has made."""
    try:
        part.mkdir()  # asks the file server itself; a mere look may be answered from this machine's memory
        part.rmdir()
    except FileExistsError:
        return
    except FileNotFoundError:
        pass
    raise UserError(f"the first rank made {part} and it is not there; save to a disk that all machines share")


def put(path: Path) -> None:
    """Give the complete folder its name. See [Note: complete or absent]."""
    part, older = part_of(path), replaced(path)
    _flush(part)
    if os.path.lexists(path):
        remove(older)
        path.rename(older)
    try:
        part.rename(path)
    except BaseException:
        with suppress(OSError):
            older.rename(path)
        raise
    _flush(path.parent)
    with suppress(OSError, UserError):  # the next save tries again
        remove(older)


def remove(path: str | Path) -> None:
    """Remove a checkpoint, or what stands in its place. Half removed it is never loaded."""
    path = Path(path)
    if not os.path.lexists(path):
        return
    _refuse_other(path)
    part = part_of(path)
    _discard(part)
    path.rename(part)
    _discard(part)


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _refuse_other(path: Path) -> None:
    if path.is_dir() and not (path / VALUES).is_file() and not _is_ours(path):
        raise UserError(f"there is a folder of this name that is no checkpoint: {path}; give another name")


def _is_ours(path: Path) -> bool:
    """Whether a folder is a checkpoint, or as much of one as there is."""
    return path.is_dir() and all(
        entry.name == VALUES or (entry.name.startswith("shard-") and entry.suffix == ".safetensors")
        for entry in path.iterdir()
    )
