"""`python -m gan.export`."""

from gan.ending import end
from gan.export.command import main

if __name__ == "__main__":
    end(main())
