"""Mistakes that the user can correct, and the form of what is printed."""

import io
import os
import sys
import time
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_only

from gan.files.loading import HOME, LIGHTNINGS_RANKS, OURS

if TYPE_CHECKING:
    from tqdm import tqdm

LONGEST = 300  # characters of two lines that become one
FIRST_RANK_SPEAKS = 12  # seconds in which the first rank prints another rank's error and ends that rank


def printable(text: str) -> str:
    """The text with what a terminal would obey, or cannot show, as an escape such as \\x1b. Lines stay lines."""
    return "".join(one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode() for one in text)


def table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """The lines of a table. Columns are as wide as their longest words, and those in `left` begin at the left."""
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    both = ([*enumerate(zip(row, wide, strict=True))] for row in rows)
    lines = ("  ".join(c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in cells) for cells in both)
    return [f"  {line}".rstrip() for line in lines]


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    cells = ([" ".join(str(each).replace("|", "\\|").split()) for each in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells))


def reason(error: BaseException) -> str:
    """What went wrong, in one line; with the next one where the first only begins, as torch's of weights do."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    first, *more = str(error).splitlines() or [type(error).__name__]
    return shorten(f"{first} {more[0]}", LONGEST, placeholder=" ...") if first.endswith(":") and more else first


class UserError(ValueError):
    """A mistake in what was asked for. The message says what was wrong and what to type instead.

    The commands print the message without a traceback. A traceback means a mistake in the program.
    """

    said = False  # True once it has been printed
    agreed = False  # True where every rank raises it at the same place

    def __str__(self) -> str:
        """The message, wherever it is shown. It may name a file whose name would move the terminal's cursor."""
        return printable(super().__str__())

    def _render_traceback_(self) -> list[str]:
        """A notebook calls this. It shows only the message, too."""
        return [f"error: {self}"]


class Damaged(UserError):
    """A file is not as it was written."""


class DiskError(UserError):
    """The disk of one of the ranks has failed, or is full. All ranks that save together raise it."""


@contextmanager
def explained(
    words: str, *kinds: type[Exception], saying: str = "", become: type[UserError] = UserError
) -> Iterator[None]:
    """Inside the `with`, errors of these kinds `become` an error of these words, in which {why} stands for the reason.

    Only errors that say `saying`; and no UserErrors, if that is none of the kinds.
    """
    try:
        yield
    except kinds as error:
        if saying not in str(error) or (isinstance(error, UserError) and UserError not in kinds):
            raise
        why = getattr(error, "strerror", None) or reason(error)
        raise become(words.replace("{why}", why)) from error


# What reading content raises that is not what it claims to be.
NOT_SO = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, OverflowError)


def reading(file: str, otherwise: str = "{why}") -> AbstractContextManager[None]:
    """What is wrong in a file's content becomes `Damaged`, for the reason `otherwise`. Only to read that content in."""
    return explained(f"{file} is damaged: {otherwise}", *NOT_SO, become=Damaged)


class WorkerLost(UserError):
    """A worker process of a loader has died or is stuck. The same may go well when it is tried again."""


class RankLost(UserError):
    """This rank ends because another rank has failed or is gone. The message names that rank."""

    refused = False  # whether the other rank has found a mistake that no restart cures


def this_rank() -> int:
    """The number of this process, as Lightning knows it, or will know it when it is imported."""
    said = (os.environ[name] for name in LIGHTNINGS_RANKS if name in os.environ)
    known = getattr(rank_zero_only, "rank", None)
    return int(next((text for text in said if text.isdecimal()), "0")) if known is None else known


def refuse(error: Exception) -> int:
    """Print an error once, and return the exit status 2.

    The first rank prints at once, for all ranks. Another rank waits first: meanwhile the first rank either prints the
    same error and ends this rank, or does not have the error, and then this rank prints it.
    """
    if getattr(error, "said", False):
        return 2
    if this_rank() != 0 and not isinstance(error, RankLost):
        time.sleep(FIRST_RANK_SPEAKS)
    # An error from a data loader's worker holds the worker's traceback. The message is its last line.
    message = str(error).rpartition("UserError: ")[2].strip()
    print(f"error: {printable(message)}", file=sys.stderr, flush=True)
    return 2


@cache
def escape_warnings() -> None:
    """From now on warnings are shown as `printable` text, and those of our own packages without the line of source."""
    shown, ours = warnings.formatwarning, tuple(f"{HOME / name}{os.sep}" for name in ("gan", *OURS))

    def escaped(message: Any, category: Any, filename: str, *more: Any, **kwargs: Any) -> str:
        own = filename.startswith(ours)
        return printable(f"warning: {message}\n" if own else shown(message, category, filename, *more, **kwargs))

    warnings.formatwarning = escaped


class _Lines(io.TextIOBase):
    """In place of a terminal: each state of a bar is a line of its own, so that a file of them can be read."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        if shown := text.strip():
            print(shown, file=sys.stderr)
        return len(text)


def progress(*items: Any, **how: Any) -> "tqdm":
    """A progress bar, twice a second or, where there is no terminal, as a line each 20 seconds."""
    from tqdm import tqdm

    terminal = sys.stderr.isatty()
    where: dict[str, Any] = {"mininterval": 0.5 if terminal else 20, "file": None if terminal else _Lines()}
    settings: dict[str, Any] = {"dynamic_ncols": True, "delay": 1, **where, **how}
    return tqdm(*items, **settings)
