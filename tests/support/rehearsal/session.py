"""What a person types on a system: a run that is trained, stopped, resumed, looked at, scored and exported.

With `--short` it is trained, stopped and resumed. The run is a tiny R3GAN that this file has.
"""

import os
import signal
import sys
from typing import Any

from datasets import Faces, GanData
from gan.games.r3gan import R3Gan
from gan.runs import Run
from nets.r3 import R3Discriminator, R3Generator

VARIABLE = "STOP_AFTER"
RUN = f"{__file__}:stops"
TRAIN = (RUN, "--devices", "1", "--accelerator", "cpu", "--save-every", "2", "--sample-every", "4")


class Stops(R3Gan):
    """It presses Ctrl-C itself after the step that the environment names."""

    def on_train_batch_end(self, *_: Any) -> None:
        if os.environ.get(VARIABLE) == str(self.step):
            signal.raise_signal(signal.SIGINT)


def stops(max_steps: int = 6, batch_size: int = 4, workers: int = 0, seed: int = 0) -> Run:
    game = Stops(R3Generator(4, [4, 4, 4]), R3Discriminator([4, 4, 4]), batch_size=batch_size)
    train, val = Faces(12, size=16), Faces(4, size=16, first=1000)
    return Run(game, GanData(train, val, batch_size=batch_size, workers=workers, seed=seed), max_steps)


def main() -> None:
    """One command after the other in this process: to import takes most of their time."""
    from gan import evaluate as evaluate
    from gan import export as export
    from gan import fit as fit
    from gan import plan as plan
    from gan import sample as sample
    from gan.app.outputs import outputs
    from gan.bench import __main__ as bench
    from gan.files.system import WINDOWS

    more = (
        (sample, ["auto", "show", "--singles"]),
        (evaluate, ["--scores", "features", "--devices", "1"]),
        (export, []),
        (plan, [RUN, "--strategy", "ddp", "--devices", "1"]),
        (fit, ["--list-runs"]),
        (fit, [*TRAIN, "--dry-run", "--out", "dry"]),
    )
    short, typed = "--short" in sys.argv, [word for word in sys.argv[1:] if word != "--short"]
    with outputs():
        os.environ[VARIABLE] = "3"
        assert fit.main([*TRAIN, *typed]) == 0
        del os.environ[VARIABLE]
        assert fit.main(["--resume", "auto", "--workers", "0", "--strategy", "auto"]) == 0
        for command, words in () if short else more:
            assert command.main(words) == 0, words
        assert short or bench.main(["speed"]) == 2
        if WINDOWS:
            assert fit.main([RUN, "--devices", "2", "--accelerator", "cpu"]) == 2


if __name__ == "__main__":
    main()
