import sys

from gan.verify.command import main

if __name__ == "__main__":
    sys.exit(main())
