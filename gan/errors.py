"""Mistakes that the user can correct, and how the commands print them."""

import sys
import time

from lightning.pytorch.utilities import rank_zero_only

FIRST_RANK_SPEAKS = 12  # seconds in which the first rank prints another rank's error and ends that rank


class UserError(ValueError):
    """A mistake in what was asked for. The message says what was wrong and what to type instead.

    The commands print the message without a traceback. A traceback means a mistake in the program.
    """

    said = False  # True once it has been printed
    agreed = False  # True where every rank raises it at the same place

    def _render_traceback_(self) -> list[str]:
        """A notebook calls this. It shows only the message, too."""
        return [f"error: {self}"]


class RankLost(UserError):
    """This rank ends because another rank has failed or is gone. The message names that rank."""


def refuse(error: Exception) -> int:
    """Print an error once, and return the exit status 2.

    The first rank prints at once, for all ranks. Another rank waits first: meanwhile the first rank either prints the
    same error and ends this rank, or does not have the error, and then this rank prints it.
    """
    if getattr(error, "said", False):
        return 2
    if rank_zero_only.rank != 0 and not isinstance(error, RankLost):
        time.sleep(FIRST_RANK_SPEAKS)
    # An error from a data loader's worker holds the worker's traceback. The message is its last line.
    message = str(error).rpartition("UserError: ")[2].strip()
    print(f"error: {message}", file=sys.stderr, flush=True)
    return 2
