"""`python -m gan.evaluate`."""

from gan.ending import end
from gan.evaluate.command import main

if __name__ == "__main__":
    end(main())
