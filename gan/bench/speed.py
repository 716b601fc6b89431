"""Pictures a second of a run on one device: in float32 and bf16, compiled or not, with channels last or not.

Each way trains in a process of its own. The first round of steps is not compiled, and its multiplications are counted;
the second warms up, and the third is timed. A round has `--steps` steps, so that it has the same lazy turns.
  of limit    the time that a step's multiplications take at the device's own rate, as a share of the time that the
              step takes; the rate is that of a plain convolution of the same type, measured in the same process
  peak        the most memory that tensors had on the device; on a CPU the most that the process had
"""

import platform
import shlex
from collections.abc import Iterator, Mapping
from datetime import date
from itertools import product
from operator import truediv
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jsonargparse.typing import PositiveInt
from lightning import seed_everything

from gan.app.fitting.pace import peak_memory
from gan.app.run.parser import items, listed
from gan.bench.device import Counter, Measuring, convolution_rate, multiplications, now, place, train, wait
from gan.bench.harness import Column, Figures, RunBenchmark, in_world
from gan.files.disk import write_whole
from gan.files.errors import markdown
from gan.module import GanModule
from gan.runs import build
from strategies import PhaseStrategy
from strategies.accelerator import best_device
from strategies.batches.micro_batches import Batches

PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16}
Precisions = listed("Precisions", "|".join(PRECISIONS), f"one or both of {','.join(PRECISIONS)}")
EXAMPLES = """examples:
  python -m gan.bench speed                                          the built-in run
  python -m gan.bench speed r3gan-faces --size 64 --batch-size 64 --steps 8
  python -m gan.bench speed my_game.py:my_run --write speed.md       append the table to a file
"""


class Way(NamedTuple):
    """How the run is trained: the Trainer's precision, and whether networks are compiled and in channels last."""

    precision: str
    title: str = "as it is"


def measure(run: str, settings: Mapping[str, Any], way: Way, steps: int) -> Figures:
    seed_everything(0, verbose=False)
    made = build(run, **settings)
    if "channels last" in way.title:
        made.game.to(memory_format=torch.channels_last)
    strategy = PhaseStrategy("single+compile" if "compiled" in way.title else "single")
    how = {"precision": way.precision, "devices": 1, "max_steps": 3 * steps}
    seconds, flops, pictures = train(made.game, made.data, strategy, measuring(made.game, steps), **how)
    device = made.game.device
    limit = flops / convolution_rate(device, PRECISIONS[way.precision]) / seconds
    own = {"peak MB": peak_memory(device), "place": place(device)}
    return {"pictures/s": pictures / seconds, "flops": flops, "of limit": limit, **own}


def measuring(game: GanModule, steps: int) -> Measuring:
    """Seconds and multiplications of a step, and its pictures."""
    torch.compiler.set_stance("force_eager")
    with Counter(multiplications) as counter:
        yield from wait(steps)
    torch.compiler.set_stance("default")
    yield from wait(steps)
    began = now(game.device)
    pictures = Batches().rows((yield from wait(steps)))
    return (now(game.device) - began) / steps, counter.total // steps, pictures


class SpeedBenchmark(RunBenchmark[Way]):
    name, places = "speed", ("precision", "way")
    columns = (
        Column("pictures/s", ".1f"),
        Column("times as fast", ".2f", key="pictures/s", against=truediv),
        Column("of limit", ".0%"),
        Column("peak MB", ",.0f", 2**20),
    )
    usage, texts = "[--steps N] [--precisions NAME,NAME] [--write FILE]", {"epilog": EXAMPLES}

    def add_options(self, add: Any) -> None:
        what = "number formats of the Trainer, with commas"
        add("--precisions", type=Precisions, default=",".join(PRECISIONS), help=what)
        add("--steps", type=PositiveInt, default=16, help="steps of each of the three rounds")
        add("--write", type=str | None, default=None, help="file to which the table is appended")

    def cells(self) -> Iterator[Way]:
        titles = ("as it is", "channels last", "compiled", "compiled, channels last")
        return (Way(*each) for each in product(items(self.settings.precisions), titles))

    def measure(self, way: Way) -> Figures:
        return in_world(measure, *self.run, way, self.settings.steps, device=best_device())[0]

    def heading(self) -> str:
        return f"{self.known('place', platform.machine())}, torch {torch.__version__}, {date.today()}"

    def write(self) -> None:
        """Append the table to the file that is named, and the command that has made it."""
        if not self.settings.write:
            return
        path, (head, *rows) = Path(self.settings.write), self.table()
        command = f"    python -m gan.bench speed {shlex.join(self.argv)}"
        text = "\n\n".join([f"## {self.heading()}", command, markdown(head, rows), *self.reasons()])
        before = path.read_text() if path.exists() else ""
        write_whole(path, f"{before}\n{text}\n")
