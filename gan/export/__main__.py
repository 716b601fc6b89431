"""`python -m gan.export`."""

import sys

from gan.export.command import main

if __name__ == "__main__":
    sys.exit(main())
