"""Makes sure that a checkpoint's folder appears completely or not at all.

[Note: complete or absent]
All files are written into `last.ckpt.part` and flushed. When all ranks have finished, the first rank renames it. A
folder that ends in `.part` is never loaded, so a killed process leaves no incomplete checkpoint that looks complete.
If there is already a `last.ckpt`, it is first renamed to `last.replaced.ckpt`, and removed at the end. A kill between
the two renames leaves it under that name. It can be loaded from there, and a failed load of `last.ckpt` names it in the
error. To remove a checkpoint, it is first renamed to `.part`.

While a process saves, it holds a shared lock on the parent folder. The system releases the lock when the process ends.
Before it writes, the process tries to get an exclusive lock. If it gets one, no other process is writing there. Then
every `.part` is a leftover of a killed process, and is removed. On a file system without locks only a leftover of the
same name is removed.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gan.files.checkpoint import FORMER, PART, SHARDS, replaced
from gan.files.disk import lockable
from gan.files.errors import UserError, explained
from gan.files.system import WINDOWS
from gan.files.system import lock as lock_handle
from gan.files.values import VALUES

NAMES = {VALUES, *FORMER}  # of files in a checkpoint, beside those of the ranks


def part_of(path: Path) -> Path:
    return path.with_name(path.name + PART)


@contextmanager
def new_part(path: Path) -> Iterator[None]:
    """Make an empty folder to write a checkpoint in. After a failure it is removed."""
    part = part_of(path)
    _refuse_other(path)
    part.parent.mkdir(parents=True, exist_ok=True)
    with lockable(part.parent) as lock:
        _remove_leftovers(path, lock)
        with suppress(OSError):  # a file system without locks
            lock_handle(lock, shared=True)
        taken = f"{part} is in the way: another process is writing it, or it is no checkpoint; remove it"
        with explained(taken, FileExistsError):
            part.mkdir()
        try:
            yield
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise


def _remove_leftovers(path: Path, lock: int) -> None:
    try:
        lock_handle(lock)
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
    """Raise if this rank does not see the folder that the first rank has made."""
    try:
        part.mkdir()  # this reaches the file server; `exists` may be answered from this machine's cache
        part.rmdir()
    except FileExistsError:
        return
    except FileNotFoundError:
        pass
    raise UserError(f"the first rank made {part} and it is not there; save to a disk that all machines share")


def put_in_place(path: Path) -> None:
    """Give the complete folder its final name. See [Note: complete or absent]."""
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
    """Remove a checkpoint, or a file of its name. A checkpoint that is only partly removed is never loaded."""
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
    if not WINDOWS:  # it opens no folder, and writes down names by itself
        with lockable(folder) as handle:
            os.fsync(handle)


def _refuse_other(path: Path) -> None:
    ours = any((path / name).is_file() for name in NAMES) and any(path.glob(SHARDS))
    if path.is_dir() and not ours and not _is_ours(path):
        raise UserError(f"there is a folder of this name that is no checkpoint: {path}; give another name")


def _is_ours(path: Path) -> bool:
    """Whether a folder is a checkpoint, also an incomplete one: it has no files but those of a checkpoint."""
    return path.is_dir() and all(
        entry.name in NAMES or (entry.name.startswith("shard-") and entry.suffix == ".safetensors")
        for entry in path.iterdir()
    )
