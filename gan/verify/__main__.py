from gan.outputs import run
from gan.verify.command import main

if __name__ == "__main__":
    run(main)
