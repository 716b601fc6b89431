"""The one kind of error that is the user's to mend, and how the commands say it."""

import sys
import time

from lightning.pytorch.utilities import rank_zero_only


class UserError(ValueError):
    """A mistake in what was asked for: the message says what was wrong and what to type instead.

    The commands print it without a traceback; a traceback is kept for mistakes of ours.
    """

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the message alone, too."""
        return [f"error: {self}"]


def refuse(error: Exception) -> int:
    """Say it once, from the first rank that has it: the others find out together, or are ended by it. Returns 2."""
    if rank_zero_only.rank != 0:
        time.sleep(3)
    # A worker process wraps the message in its own traceback; the message is its last line.
    message = str(error).rpartition("UserError: ")[2].strip()
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 2
