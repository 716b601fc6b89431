"""What a command prints. It ends as it would have ended, whether or not anybody reads that."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

from gan.ending import end
from gan.errors import reason


def run(main: Callable[[], int]) -> NoReturn:
    """Be a command, as the main program of a process: `main` returns the exit status."""
    with outputs():
        try:
            status = main()
        except SystemExit as asked:  # for --help
            status = int(asked.code or 0)
        end(status)


@contextmanager
def outputs() -> Iterator[None]:
    """Inside the `with`, nothing fails because standard output or standard error is closed, broken or full."""
    before = sys.stdout, sys.stderr
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # else the next file that is opened would get this number, and all that is printed
            os.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = Output("standard output", before[0]), Output("standard error", before[1])
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


class Output:
    """A text stream that somebody may stop to read. What cannot be written is left out."""

    def __init__(self, name: str, stream: TextIO | None) -> None:
        """`stream` is None if it was closed from the beginning."""
        self._name, self._said = name, False
        self._stream = Path(os.devnull).open("w") if stream is None else stream  # noqa: SIM115 - as long as the process

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, deed: Any, *args: Any) -> None:
        try:
            deed(*args)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and not self._stream.closed:
                raise
            if not self._said:
                self._said = True
                other = sys.stdout if self is sys.stderr else sys.stderr
                words = f"{self._name} cannot be written ({reason(error)}); the command goes on"
                print(f"\nwarning: {words}", file=other, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
