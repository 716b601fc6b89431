"""`python -m gan.sample`."""

import sys

from gan.sample.command import main

if __name__ == "__main__":
    sys.exit(main())
