"""`python -m gan.sample`."""

from gan.ending import end
from gan.sample.command import main

if __name__ == "__main__":
    end(main())
