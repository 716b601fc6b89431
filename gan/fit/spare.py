"""What training can do without: a picture, a row of metrics. If it fails, that is said once."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gan.errors import reason


class Spare:
    """Does what may fail, and says it the first time for each kind of file."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    @contextmanager
    def trying(self, path: Path, kind: str = "", deed: str = "written") -> Iterator[None]:
        """Inside the `with`, the file is written. A failure ends only that. `kind` stands for files such as this."""
        try:
            yield
        except OSError as error:
            if (kind or path.name) not in self._said:
                self._said.add(kind or path.name)
                warn(f"{path} cannot be {deed} ({reason(error)}); training goes on")


def warn(text: str) -> None:
    """Print a warning below the progress bar."""
    print(f"\nwarning: {text}", file=sys.stderr, flush=True)
