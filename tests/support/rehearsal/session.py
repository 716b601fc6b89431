"""What a person types on a system: a run that is trained, stopped, resumed, looked at, scored and exported.

With `--short` it is trained, stopped and resumed.
"""

import os
import sys
from pathlib import Path

from tests.support.rehearsal import stops
from tests.support.rehearsal.systems import status_of_fork

RUN = f"{Path(stops.__file__)}:stops"
TRAIN = (RUN, "--devices", "1", "--accelerator", "cpu", "--save-every", "2", "--sample-every", "4")


def main() -> None:
    """The first command is a process of its own, and the others take this one: to import takes most of their time."""
    from gan import evaluate as evaluate
    from gan import export as export
    from gan import fit as fit
    from gan import plan as plan
    from gan import sample as sample
    from gan.app.outputs import end, outputs
    from gan.bench import __main__ as bench
    from gan.files.system import WINDOWS

    def stop() -> None:
        os.environ[stops.VARIABLE] = "3"
        with outputs():
            end(fit.main([*TRAIN, *typed]))

    more = (
        (sample, ["auto", "show", "--singles"]),
        (evaluate, ["--scores", "features", "--devices", "1"]),
        (export, []),
        (plan, [RUN, "--strategy", "ddp", "--devices", "1"]),
        (fit, ["--list-runs"]),
        (fit, [*TRAIN, "--dry-run", "--out", "dry"]),
    )
    short, typed = "--short" in sys.argv, [word for word in sys.argv[1:] if word != "--short"]
    assert status_of_fork(stop) == 0
    with outputs():
        assert fit.main(["--resume", "auto", "--workers", "0", "--strategy", "auto"]) == 0
        for command, words in () if short else more:
            assert command.main(words) == 0, words
        assert short or bench.main(["speed"]) == 2
        if WINDOWS:
            assert fit.main([RUN, "--devices", "2", "--accelerator", "cpu"]) == 2


if __name__ == "__main__":
    main()
