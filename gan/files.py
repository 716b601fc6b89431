"""Files that are written as a whole or not at all, and files that are read only if they are files."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give a temporary file beside `path` to write to; it becomes `path` when the block ends without an error.

    So a reader of `path` sees either the old content or the new one, also after a crash. The temporary file is made at
    once: if nothing can be written, the error comes before the work. Its name ends in `.part` and contains the process
    id, so that two processes may write the same file. After an error it is removed.
    """
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.touch()
        yield part
        with part.open("r+b") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def regular(path: str | Path) -> os.stat_result:
    """Size and times of a file that is about to be read. Anything that is no regular file is an OSError that says so.

    A FIFO would wait for a writer, and a device such as /dev/zero never ends.
    """
    state = os.stat(path)
    for test, kind in _OTHERS:
        if test(state.st_mode):
            raise OSError(errno.EINVAL, f"it is {kind}, and no file", str(path))
    return state


_OTHERS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def read_text(path: str | Path, most: int) -> str:
    """The text of a regular file of at most `most` bytes. A larger one is an OSError, text of no UTF-8 a ValueError."""
    regular(path)
    with open(path, "rb", opener=_without_waiting) as file:
        content = file.read(most + 1) or b""  # files of /proc say that they are empty, and some of them wait
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))
    return content.decode()


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
