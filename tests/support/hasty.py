"""`gan.fit`, whose ranks give up a silent host sooner, so that a test waits less: `python -m tests.support.hasty`."""

import sys

from gan.fit import main
from strategies.processes import lifeline

SILENCE = 4

if __name__ == "__main__":
    lifeline.SILENCE = SILENCE
    sys.exit(main())
