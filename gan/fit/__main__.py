from gan.ending import end
from gan.fit.command import main

if __name__ == "__main__":
    end(main())
