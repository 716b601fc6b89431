"""`gan.fit`, whose ranks give up a silent host sooner, so that a test waits less: `python -m tests.support.hasty`."""

import sys

from gan import fit
from strategies.processes import lifeline

SILENCE = 4


def main() -> int:
    lifeline.SILENCE = SILENCE
    return fit.main(sys.argv[1:])
