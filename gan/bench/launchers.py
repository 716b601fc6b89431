"""How long two ranks take to start, and how fast they train, by what started them.

The launchers take turns, so that a slow moment of the machine meets all of them. Each rank is one thread on the CPU.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from lightning import Callback, Trainer

from gan.app.run.parser import PlainParser
from gan.bench.harness import ONLY_TRAINING
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


def main(argv: list[str]) -> int:
    """Start and train some rounds, and print a table."""
    parser = PlainParser(prog="python -m gan.bench launchers", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often each launcher starts the ranks")
    parser.add_argument("--steps", type=int, default=300, help="how many steps are timed in each start")
    settings = parser.parse_args(argv)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in LAUNCHERS}
    for number in range(settings.rounds):
        for name, command in LAUNCHERS.items():
            start, rate = _measure(command, settings.steps)
            found[name].append((start, rate))
            print(f"round {number + 1}, {name}: {start:.1f} s, {rate:.1f} steps/s", flush=True)
    print(f"\n{'':10}{'start, s':>10}{'of popen':>10}{'steps/s':>10}{'of popen':>10}")
    starts, rates = ({name: mean(pair[k] for pair in pairs) for name, pairs in found.items()} for k in (0, 1))
    for name in LAUNCHERS:
        start, rate = starts[name] / starts["popen"], rates[name] / rates["popen"]
        print(f"{name:10}{starts[name]:10.1f}{start:10.2f}{rates[name]:10.1f}{rate:10.2f}")
    return 0


def _measure(command: tuple[str, ...], steps: int) -> tuple[float, float]:
    """Seconds from typing the command to the end of the first step, and steps a second after the first WARM."""
    with tempfile.TemporaryDirectory() as folder:
        note = Path(folder) / "note"
        variables = {**os.environ, NOTE: str(note), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        began = time.monotonic()
        done = subprocess.run([sys.executable, *command, str(steps)], env=variables, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        first, warm, last = map(float, note.read_text().split())
    return first - began, steps / (last - warm)


class Clock(Callback):
    """Notes when the first step, the WARM-th and the last have ended. The clock is the same in all processes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step in (1, WARM, trainer.max_steps):
            self.times.append(time.monotonic())

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            Path(os.environ[NOTE]).write_text(" ".join(map(str, self.times)))


def train(start_method: str, steps: str) -> None:
    """The program that is started: a small run under ddp."""
    run = build("r3gan-faces", size=16, width=8, latent=8, batch_size=16, faces=64, held_out=8)
    Trainer(
        strategy=PhaseStrategy("ddp", start_method=start_method),
        accelerator="cpu",
        devices=RANKS,
        max_steps=WARM + int(steps),
        callbacks=[Clock()],
        **ONLY_TRAINING,
    ).fit(run.game, run.data)


if __name__ == "__main__":
    train(*sys.argv[1:])
