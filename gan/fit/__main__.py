from gan.fit.command import main
from gan.outputs import run

if __name__ == "__main__":
    run(main)
