import sys

from gan.plan.command import main

if __name__ == "__main__":
    sys.exit(main())
