from gan.outputs import run
from gan.sample.command import main

if __name__ == "__main__":
    run(main)
