"""Pictures a second of a run on one device: in float32 and bf16, compiled or not, with channels last or not.

Each way trains in a process of its own. The first round of steps is not compiled, and its multiplications are counted;
the second warms up, and the third is timed. A round has `--steps` steps, so that it has the same lazy turns.
  of limit    the time that a step's multiplications take at the device's own rate, as a share of the time that the
              step takes; the rate is that of a plain convolution of the same type, measured in the same process
  peak        the most memory that tensors had on the device; on a CPU the most that the process had
"""

import platform
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import date
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from lightning import Callback, LightningModule, Trainer, seed_everything

from gan.app.outputs import quiet
from gan.app.run import run_options
from gan.app.run.options import run_settings
from gan.app.run.parser import Parser
from gan.bench.harness import ONLY_TRAINING, Multiplications, convolution_rate, now, peak_memory, place
from gan.files.disk import whole_file
from gan.files.errors import UserError
from gan.runs import build
from strategies import PhaseStrategy
from strategies.micro_batches import row_counts
from strategies.processes.world import in_a_line

PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}
HEAD = ("precision", "way", "pictures/s", "times as fast", "of limit", "peak MB")
EXAMPLES = """examples:
  python -m gan.bench speed                                          the built-in run
  python -m gan.bench speed r3gan-faces --size 64 --batch-size 64 --steps 8
  python -m gan.bench speed my_game.py:my_run --write speed.md       append the table to a file
"""


@dataclass(frozen=True)
class Way:
    """How the run is trained: the Trainer's precision, and whether networks are compiled and in channels last."""

    precision: str
    compiled: bool = False
    channels_last: bool = False

    @property
    def title(self) -> str:
        words = ["compiled"] * self.compiled + ["channels last"] * self.channels_last
        return ", ".join(words) or "as it is"


@dataclass(frozen=True)
class Speed:
    """What a way has given. `rate` is the device's own, in multiplications and additions a second, as `flops` are."""

    pictures: float
    seconds: float
    flops: int
    rate: float
    peak: int
    place: str

    @property
    def of_limit(self) -> float:
        return self.flops / self.rate / self.seconds


class Rounds(Callback):
    """Counts multiplications in the first round of steps, and times the third."""

    def __init__(self, steps: int) -> None:
        self.steps, self.counter = steps, Multiplications()
        self.began = self.seconds = 0.0
        self.pictures = 0  # of a step

    def on_train_batch_start(self, trainer: Trainer, game: LightningModule, batch: Any, number: int) -> None:
        self.pictures = row_counts(batch)[0]
        if number == 0:
            torch.compiler.set_stance("force_eager")
            self.counter.__enter__()
        if number == self.steps:
            self.counter.__exit__(None, None, None)
            torch.compiler.set_stance("default")
        if number == 2 * self.steps:
            self.began = now(game.device)

    def on_train_end(self, trainer: Trainer, game: LightningModule) -> None:
        self.seconds = now(game.device) - self.began


def measure(run: str, settings: Mapping[str, Any], way: Way, steps: int) -> Speed:
    """Train the run in this way, in this process."""
    quiet()
    seed_everything(0, verbose=False)
    made = build(run, **settings)
    if way.channels_last:
        made.game.to(memory_format=torch.channels_last)
    rounds = Rounds(steps)
    trainer = Trainer(
        strategy=PhaseStrategy("single+compile" if way.compiled else "single"),
        precision=way.precision,
        devices=1,
        max_steps=3 * steps,
        callbacks=[rounds],
        **ONLY_TRAINING,
    )
    trainer.fit(made.game, made.data)
    device = made.game.device
    return Speed(
        rounds.pictures * steps / rounds.seconds,
        rounds.seconds / steps,
        rounds.counter.count // steps,
        convolution_rate(device, PRECISIONS[way.precision]),
        peak_memory(device),
        place(device),
    )


def figures(settings: Namespace) -> dict[Way, Speed | str]:
    """What each way has given, or why it fails; says each when it is known."""
    found: dict[Way, Speed | str] = {}
    request = settings.run, run_settings(settings)
    for precision, compiled, last in product(settings.precisions.split(","), (False, True), (False, True)):
        way = Way(precision, compiled, last)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            try:
                found[way] = alone.submit(measure, *request, way, settings.steps).result()
            except BrokenProcessPool:
                found[way] = "its process was killed; is there too little memory?"
            except Exception as error:  # noqa: BLE001 - another way may work
                found[way] = in_a_line(error)
        speed = found[way]
        said = speed if isinstance(speed, str) else f"{speed.pictures:.1f} pictures/s"
        print(f"{precision}, {way.title}: {said}", flush=True)
    return found


def rows(found: Mapping[Way, Speed | str]) -> list[Sequence[str]]:
    """The table's cells; speeds are compared with that of the first way that works."""
    first = next((speed for speed in found.values() if isinstance(speed, Speed)), None)
    made: list[Sequence[str]] = []
    for way, speed in found.items():
        if isinstance(speed, str):
            made.append((way.precision, way.title, speed, "", "", ""))
            continue
        faster = f"{speed.pictures / first.pictures:.2f}"
        limit, peak = f"{speed.of_limit:.0%}", f"{speed.peak / 2**20:,.0f}"
        made.append((way.precision, way.title, f"{speed.pictures:.1f}", faster, limit, peak))
    return made


def main(argv: list[str]) -> int:
    """Measure every way, print a table, and append it to a file if one is named."""
    settings = run_options.parse(
        argv,
        _add_own,
        prog="python -m gan.bench speed",
        usage="python -m gan.bench speed [RUN] [--steps N] [--precisions NAME,NAME] [--write FILE] [options]",
        description=__doc__,
        epilog=EXAMPLES,
    )
    for name in settings.precisions.split(","):
        if name not in PRECISIONS:
            raise UserError(f"cannot measure --precisions {name}; type one or both of {','.join(PRECISIONS)}")
    found = figures(settings)
    where = next((speed.place for speed in found.values() if isinstance(speed, Speed)), None)
    title = f"{where or platform.machine()}, torch {torch.__version__}, {date.today()}"
    command = f"python -m gan.bench speed {shlex.join(argv)}"
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in (HEAD, ["---"] * len(HEAD), *rows(found)))
    print(f"\n{title}\n\n{table}")
    if settings.write:
        path = Path(settings.write)
        before = path.read_text() if path.exists() else ""
        with whole_file(path) as part:
            part.write_text(f"{before}\n## {title}\n\n    {command}\n\n{table}\n")
    return 0 if where else 1


def _add_own(parser: Parser) -> None:
    add = parser.add_argument
    add("--precisions", type=str, default=",".join(PRECISIONS), help="number formats of the Trainer, with commas")
    add("--steps", type=PositiveInt, default=16, help="steps of each of the three rounds")
    add("--write", type=str | None, default=None, help="file to which the table is appended")
