"""The one kind of error that is the user's to mend, and how the commands say it."""

import sys
import time

from lightning.pytorch.utilities import rank_zero_only

OTHERS = 12  # seconds in which the first rank says what another one has met, and ends it


class UserError(ValueError):
    """A mistake in what was asked for: the message says what was wrong and what to type instead.

    The commands print it without a traceback; a traceback is kept for mistakes of ours.

    `said` once it has been printed. `agreed` where every rank raises it by itself, at the same place.
    """

    said = False
    agreed = False

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the message alone, too."""
        return [f"error: {self}"]


class RankLost(UserError):
    """Another rank is gone or has failed, and this one ends because of it; the message names it."""


def refuse(error: Exception) -> int:
    """Say it once, from the first rank that has it: the others find out together, or are ended by it. Returns 2."""
    if getattr(error, "said", False):
        return 2
    if rank_zero_only.rank != 0 and not isinstance(error, RankLost):
        time.sleep(OTHERS)
    # A worker process wraps the message in its own traceback; the message is its last line.
    message = str(error).rpartition("UserError: ")[2].strip()
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 2
