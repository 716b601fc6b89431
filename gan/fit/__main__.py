import sys

from gan.fit.command import main

if __name__ == "__main__":
    sys.exit(main())
