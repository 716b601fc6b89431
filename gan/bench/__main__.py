from gan.app.outputs import run
from gan.bench.command import main

if __name__ == "__main__":
    run(main)
