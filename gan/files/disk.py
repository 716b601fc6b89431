"""Files that are written as a whole or not at all, that are read only if they are plain files, or that are locked."""

import errno
import os
import pickle
import re
import stat
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from gan.files.errors import UserError, explained
from gan.files.system import WINDOWS, after_fork, lock

LOOK = 0.1  # seconds between two tries to lock a file
AT_ONCE = getattr(os, "O_NONBLOCK", 0)  # opens without waiting
# What is no regular file, by the letters of `ls -l`.
OTHERS = {"d": "a folder", "p": "a named pipe", "s": "a socket", "c": "a device", "b": "a device"}


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary file beside `path` to write to; it becomes `path` when the block ends without an error.

    So a reader of `path` sees either the old content or the new one, also after a crash. The temporary file is made at
    once: if nothing can be written, the error comes before the work. Its name ends in `.part` and contains the process
    id, so that two processes may write the same file. After an error it is removed.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    _PARTS.add(part)
    try:
        part.touch()
        mode = part.stat().st_mode
        yield part
        part.chmod(mode)  # safetensors makes a file of its own, which others may not read
        with part.open("r+b") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        _PARTS.discard(part)
        part.unlink(missing_ok=True)


_PARTS: set[Path] = set()  # that are being written


def remove_parts() -> None:
    """Remove the temporary files of this process, which is about to end in the midst of what it does."""
    for part in [*_PARTS]:
        with suppress(OSError):
            part.unlink()


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file as a whole, so that nobody sees half of it. Text is written in UTF-8, with the ends of its lines."""
    with whole_file(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)


# Windows takes no file of these names, with any ending.
RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{number}" for port in ("com", "lpt") for number in range(1, 10))}


def name_for(text: str) -> str:
    """The text as a part of a file's name that every system takes."""
    name = re.sub(r"[^\w.-]+", "_", text).strip("_") or "picture"
    return f"_{name}" if name.partition(".")[0].lower() in RESERVED else name


def free_name(text: str, taken: set[str]) -> str:
    """Like `name_for`, but a name that is not in `taken`, and is put there. On Windows and macOS G and g are one."""
    name = name_for(text)
    while name.lower() in taken:
        name += "_"
    taken.add(name.lower())
    return name


def load_plain(path: Path) -> Any:
    """What `torch.save` has written, of tensors and plain values only. The error says why it cannot be read.

    torch's own error would advise to run the file's code. And torch does not look at the checksums that its zip has.
    """
    other = "it is not of torch.save, or holds more than tensors and plain values"
    with explained("{why}", Exception), explained(other, pickle.UnpicklingError, EOFError):  # torch raises many kinds
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                if damaged := file.testzip():
                    raise UserError(f"it is damaged: {damaged} in it has another checksum")
        return torch.load(path, map_location="cpu", weights_only=True)


def read_plain(path: Path, what: str, advice: str) -> Any:
    """What `load_plain` reads of a person's file, which should be `what`."""
    with explained(f"'{path}' cannot be read as {what}: {{why}}; {advice}", OSError, UserError):
        regular(path)
        return load_plain(path)


def regular(path: str | Path) -> os.stat_result:
    """Size and times of a file that is about to be read. Anything that is no regular file is an OSError that says so.

    A FIFO would wait for a writer, and a device such as /dev/zero never ends.
    """
    state = os.stat(path)
    if kind := OTHERS.get(stat.filemode(state.st_mode)[0]):
        raise OSError(errno.EINVAL, f"it is {kind}, and no file", str(path))
    return state


def read_text(path: str | Path, most: int) -> str:
    """The text of a regular file of at most `most` bytes. A larger one is an OSError, text of no UTF-8 a ValueError."""
    regular(path)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | AT_ONCE)) as file:
        content = file.read(most + 1) or b""  # files of /proc say that they are empty, and some of them wait
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))
    return content.decode()


_LOCKABLE: set[int] = set()


@contextmanager
def lockable(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Give a handle of a file or folder, to lock it with. The lock ends with the block, and with this process.

    A process that is forked meanwhile, such as a loader's worker, closes its copy, or the lock would outlive this one.
    Windows opens no folder. There the handle is none, and to lock it fails as on a file system without locks.
    """
    if WINDOWS and not flags & os.O_CREAT and path.is_dir():
        yield -1
        return
    handle = os.open(path, flags, 0o666)
    _LOCKABLE.add(handle)
    try:
        yield handle
    finally:
        if handle in _LOCKABLE:  # not in a forked process
            _LOCKABLE.remove(handle)
            os.close(handle)


def waits_to_lock(handle: int) -> Iterator[float]:
    """Lock an open file. While another process has it, this gives the seconds of waiting so far, again and again."""
    began = time.monotonic()
    while True:
        try:
            return lock(handle)
        except BlockingIOError:
            yield time.monotonic() - began
            time.sleep(LOOK)


def _let_go() -> None:
    for handle in _LOCKABLE:
        os.close(handle)
    _LOCKABLE.clear()


after_fork(_let_go)
