"""Files that are written as a whole or not at all."""

import os
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
