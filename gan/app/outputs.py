"""What a command prints. It ends as it would have ended, whether or not anybody reads that.

Lightning and torch are imported inside functions only, so that this file alone loads at once.
"""

import atexit
import contextlib
import io
import logging
import multiprocessing.util
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

from gan.files.errors import escape_warnings, printable, reason, this_rank
from gan.files.system import signals


def run(main: Callable[[], int]) -> NoReturn:
    """Be a command, as the main program of a process: `main` returns the exit status."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a script has started the command with &
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with outputs():
        try:
            status = main()
        except SystemExit as asked:  # for --help
            status = int(asked.code or 0)
        except Exception as error:  # noqa: BLE001 - of whatever an author has written
            sys.excepthook(type(error), error, error.__traceback__)
            status = 2  # Python's own would be 1, by which gan.plan and gan.verify answer
        end(status)


def say(*lines: object) -> None:
    """Print these lines, on the first rank only."""
    if this_rank() == 0:
        for line in lines:
            print(printable(str(line)), flush=True)


def quiet() -> None:
    """Hide Lightning's hints for beginners, which do not apply here. Its import shows them, so call it afterwards."""
    from strategies import private

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    private.LINES.setLevel(logging.INFO)
    escape_warnings()
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    warnings.filterwarnings("ignore", message="This DataLoader will create .* worker processes.*")
    warnings.filterwarnings("ignore", message=".*`srun` command is available on your system but is not used.*")
    warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
    warnings.filterwarnings("ignore", message="Total length of .* across ranks is zero.*")  # nothing is held out


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
        if isinstance(self._stream, io.TextIOWrapper) and not self._stream.closed:
            self._stream.reconfigure(errors="backslashreplace")  # Windows' own encodings lack most characters

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
                words = f"{self._name} cannot be written ({reason(error)}); the command goes on"
                print(f"\nwarning: {words}", file=sys.stdout if self is sys.stderr else sys.stderr, flush=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# ---- how a command ends ----

PATIENCE = 3.0  # seconds that a daemon process has to end
END_CHILDREN = multiprocessing.util._exit_function  # pyrefly: ignore[missing-attribute] - not in typeshed


def end(status: int) -> NoReturn:
    """End the process as sys.exit does: after other threads, and what is registered with atexit.

    sys.exit would then take all objects of torch and Lightning apart, which is a third of a short command's time. And
    it would wait without limit for daemon processes that do not end, such as a loader's worker that waits for a disk.
    """
    threading._shutdown()  # pyrefly: ignore[missing-attribute] - not in typeshed
    for number in signals("SIGCHLD"):
        signal.signal(number, signal.SIG_DFL)  # torch's handler raises when a worker dies; they may now
    atexit.unregister(END_CHILDREN)
    atexit._run_exitfuncs()
    # As multiprocessing does at exit, but for daemons that cannot be killed: `datasets.workers` has killed the others.
    ending = threading.Thread(target=END_CHILDREN, daemon=True)
    ending.start()
    ending.join(PATIENCE)
    while ending.is_alive() and not all(child.daemon for child in multiprocessing.active_children()):
        ending.join(PATIENCE)  # a process that is no daemon may take its time
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads any more
            stream.flush()
    os._exit(status)
