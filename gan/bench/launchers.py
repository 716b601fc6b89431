"""How long two ranks take to start, and how fast they train, by what started them.

The launchers take turns, so that a slow moment of the machine meets all of them. Each rank is one thread on the CPU.
The start is from typing the command to the end of the first step.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from operator import truediv
from pathlib import Path
from typing import Any

from lightning import Trainer

from gan.bench.device import train
from gan.bench.harness import Benchmark, Cell, Column, Figures
from gan.files.errors import UserError
from gan.runs import build
from strategies import PhaseStrategy

RANKS = 2
WARM = 20  # steps before the clock starts
NOTE = "GAN_BENCH_LAUNCHERS"  # an environment variable: the file for the first rank's figures
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
PROGRAM = ("-m", "gan.bench.launchers")
LAUNCHERS = {
    "popen": (*PROGRAM, "popen"),
    "spawn": (*PROGRAM, "spawn"),
    "fork": (*PROGRAM, "fork"),
    "torchrun": (*TORCHRUN, *PROGRAM, "popen"),
}


class LaunchersBenchmark(Benchmark[Cell]):
    """Starts the ranks by each launcher."""

    name, places = "launchers", ("started by",)
    columns = (
        Column("start, s", ".1f"),
        Column("of popen", ".2f", key="start, s", against=truediv),
        Column("steps/s", ".1f"),
        Column("of popen", ".2f", key="steps/s", against=truediv),
    )

    def add_options(self, add: Callable[..., Any]) -> None:
        add("--rounds", type=int, default=3, help="how often each launcher starts the ranks")
        add("--steps", type=int, default=300, help="how many steps are timed in each start")

    def cells(self) -> Iterator[Cell]:
        return ((launcher,) for launcher in LAUNCHERS)

    def base(self, cell: Cell) -> Cell:
        return ("popen",)

    def measure(self, cell: Cell) -> Figures:
        return measure(LAUNCHERS[cell[0]], self.settings.steps)

    def heading(self) -> str:
        return f"{RANKS} ranks, medians of {self.rounds} starts"


def measure(command: tuple[str, ...], steps: int) -> Figures:
    """Start the program by these words, and read what its first rank has noted."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "note"
        variables = {**os.environ, NOTE: str(note), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        began = time.monotonic()
        done = subprocess.run([sys.executable, *command, str(steps)], env=variables, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        first, warm, last = map(float, note.read_text().split())
    return {"start, s": first - began, "steps/s": steps / (last - warm)}


def program(start_method: str, steps: str) -> None:
    """What is started: a small run under ddp."""
    run = build("r3gan-faces", size=16, width=8, latent=8, batch_size=16, faces=64, held_out=8)
    moments = dict.fromkeys((1, WARM, WARM + int(steps)), note_time)
    strategy = PhaseStrategy("ddp", start_method=start_method)
    train(run.game, run.data, strategy, moments, accelerator="cpu", devices=RANKS)


def note_time(trainer: Trainer, _: Any) -> None:
    """The first rank's. The clock is the same in all processes."""
    if trainer.is_global_zero:
        with Path(os.environ[NOTE]).open("a") as note:
            note.write(f"{time.monotonic()} ")


if __name__ == "__main__":
    program(*sys.argv[1:])
