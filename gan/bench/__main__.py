"""`python -m gan.bench`."""

import sys

from gan.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
