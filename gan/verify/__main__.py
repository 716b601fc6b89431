from gan.ending import end
from gan.verify.command import main

if __name__ == "__main__":
    end(main())
