"""`python -m gan.bench`."""

from gan.bench.command import main
from gan.ending import end

if __name__ == "__main__":
    end(main())
