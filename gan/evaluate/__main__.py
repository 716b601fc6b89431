"""`python -m gan.evaluate`."""

import sys

from gan.evaluate.command import main

if __name__ == "__main__":
    sys.exit(main())
