"""How long a checkpoint holds up training, when it is written at once and in the background.

Ranks of this machine train one network. Windows of equally many steps follow each other in turns: one without a save,
one that begins with a save at once, one that begins with a save in the background, which has ended when the window
ends. So what else slows down this machine slows down all three, and the fastest round of each counts:
  the call      how long the call that saves takes: in the background, the copy and what the ranks agree on
  all of it     how much longer the window takes than one without a save: also the steps that a thread slows down,
                which writes beside them
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader

from gan import GanModule, Phase, Player
from gan.bench.device import train
from gan.bench.harness import Benchmark, Cell, Column, Figures, in_world
from strategies import PhaseStrategy

KINDS = ("without", "at once", "in the background")
WIDTH = 512
LIMIT = 1800.0  # seconds


class SavingBenchmark(Benchmark[Cell]):
    """One training, in which windows of all kinds take turns."""

    name, places = "saving", ("a save",)
    rounds = 1  # of trainings; in each are the rounds of windows
    columns = (
        Column("the call, s", ".3f"),
        Column("of at once", ".2f", key="the call, s", against=truediv),
        Column("all of it, s", ".3f"),
        Column("of at once", ".2f", key="all of it, s", against=truediv),
    )

    def add_options(self, add: Callable[..., Any]) -> None:
        add("--megabytes", type=int, default=200, help="weights, average and Adam's two moments together")
        add("--strategy", default="zero3", help="policy of the network")
        add("--ranks", type=int, default=2, help="processes")
        add("--steps", type=int, default=5, help="of a window")
        add("--rounds", type=int, default=10, help="windows of each kind")
        add("--folder", default=tempfile.gettempdir(), help="where the checkpoints go, and are removed")

    def cells(self) -> Iterator[Cell]:
        return ((kind,) for kind in KINDS[1:])

    def base(self, cell: Cell) -> Cell:
        return ("at once",)

    def measure(self, cell: Cell) -> Figures:
        return self.saves[cell[0]]

    @cached_property
    def saves(self) -> dict[str, Figures]:
        own = self.settings
        with tempfile.TemporaryDirectory(dir=own.folder) as folder:
            request = own.strategy, own.ranks, own.megabytes, own.steps, own.rounds, Path(folder)
            calls, windows = in_world(measure, *request, ranks=own.ranks, limit=LIMIT)[0]
            return costs(calls, windows, own.steps)

    def heading(self) -> str:
        own, step = self.settings, 1000 * self.known("step", math.nan)
        return f"{own.megabytes} MB of state, {own.strategy} on {own.ranks} ranks, {step:.0f} ms a step"


Seconds = dict[str, list[float]]  # by the kind of window, round by round


def costs(calls: Seconds, windows: Seconds, steps: int) -> dict[str, Figures]:
    """The least that a save of each kind takes: its call, and in all. A window has so many steps."""
    without = min(windows["without"])
    return {
        kind: {"the call, s": min(calls[kind]), "all of it, s": min(windows[kind]) - without, "step": without / steps}
        for kind in KINDS[1:]
    }


class Wide(GanModule):
    """One network of about so many bytes, with as many for its average and twice as many for Adam."""

    def __init__(self, megabytes: int) -> None:
        super().__init__()
        layers = max(1, round(megabytes * 1e6 / 4 / 4 / WIDTH**2))
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    def configure_players(self) -> Iterator[Player]:
        yield Player("net", self.net, partial(Adam, lr=1e-6), ema=0.99)

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("net", self.loss, "net")

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()


def measure(policy: str, ranks: int, megabytes: int, steps: int, rounds: int, folder: Path) -> tuple[Seconds, Seconds]:
    """On each rank: seconds of the calls that save, and of whole windows. The first round of windows is not counted."""
    calls, windows = ({kind: [] for kind in KINDS} for _ in range(2))
    kinds = KINDS * (1 + rounds)
    began = 0.0

    def between(trainer: Trainer, _: Tensor) -> None:
        """End the window before, and begin the next one."""
        nonlocal began
        number = trainer.global_step // steps - 1  # of the next one
        strategy.background.wait()
        strategy.barrier()
        if number:
            windows[kinds[number - 1]].append(time.perf_counter() - began)
        if number == len(kinds):
            return
        save: dict[str, Callable[[Path], None]] = {
            "without": lambda _: None,
            "at once": trainer.save_checkpoint,
            "in the background": strategy.save_in_background,
        }
        began = time.perf_counter()
        save[kinds[number]](folder / "last.ckpt")
        calls[kinds[number]].append(time.perf_counter() - began)

    moments = {steps * number: between for number in range(1, len(kinds) + 2)}
    # pyrefly: ignore[bad-argument-type] - torch reads any sequence
    data = DataLoader([torch.randn(4, WIDTH)] * max(moments), batch_size=None)
    strategy = PhaseStrategy(policy, check=False)
    train(Wide(megabytes), data, strategy, moments, accelerator="cpu", devices=ranks, use_distributed_sampler=False)
    calls, windows = ({kind: seconds[1:] for kind, seconds in each.items()} for each in (calls, windows))
    return calls, windows
