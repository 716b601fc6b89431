"""The progress bar, how fast a training is, when it will end, and how callbacks compute between two steps."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from torch import Tensor
from tqdm import tqdm

from gan.app.fitting import metrics
from gan.app.fitting.metrics import Record
from gan.app.outputs import say
from gan.files.errors import progress
from gan.files.system import resource
from gan.phase import Phase
from strategies import private
from strategies.batches import random_state
from strategies.strategy import phase_strategy

AHEAD = 1000  # steps that are looked at to know what the remaining ones take
Bring = Callable[[Any], Any]  # brings a batch to where a game computes


class Pace:
    """The time to the end, from what a phase has taken on average so far, and what comes between steps.

    The first step is not counted: it compiles, makes buffers, and may be tried by all ranks.
    """

    def __init__(self, phases: tuple[Phase, ...], first: int, last: int) -> None:
        self.phases, self.step, self.last = phases, first, last
        self.played, self.seconds = 0, 0.0
        self.pauses: dict[str, tuple[int, float]] = {}  # each comes every so many steps, and took so long
        self._first, self._paused, self._mark = True, 0.0, time.monotonic()

    def stepped(self) -> None:
        now = time.monotonic()
        if not self._first:
            self.played += self._due(self.step)
            self.seconds += now - self._mark - self._paused
        self._first, self._paused, self._mark = False, 0.0, now
        self.step += 1

    def paused(self, name: str, every: int, seconds: float) -> None:
        """Something that comes every so many steps took so long, between two steps."""
        self.pauses[name] = every, seconds
        self._paused += seconds

    def left(self) -> float | None:
        """The seconds to the end; None before the second step."""
        if not self.played:
            return None
        some = range(self.step, min(self.last, self.step + AHEAD))
        phases = sum(map(self._due, some)) * (self.last - self.step) / max(1, len(some))
        between = sum((self.last // every - self.step // every) * seconds for every, seconds in self.pauses.values())
        return phases * self.seconds / self.played + between

    def _due(self, step: int) -> int:
        """How many phases there are in a step; a game without them counts its steps."""
        return sum(phase.due(step, lambda _: True) for phase in self.phases) if self.phases else 1


class Bar(ProgressBar):
    """One bar for the whole run: the losses of each phase, pictures per second over all ranks, and the time to the end.

    `pictures` are those of a step, of all ranks together: as published, each counts once for all networks. A line tells
    the pace every `lines` steps. Rows of metrics.csv get the `seconds` and `pictures` (or `sounds`) so far.
    """

    def __init__(self, pictures: float | None, lines: int | None = None, record: Record | None = None) -> None:
        super().__init__()
        self.pictures, self.lines, self.record = pictures, lines, record
        self.bar: tqdm | None = None

    def disable(self) -> None:
        """Lightning calls this on all ranks except the first."""
        self.bar = None

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The validation of untrained networks tells what a validation takes."""
        self.pace = Pace(getattr(pl_module, "phases", ()), trainer.global_step, trainer.max_steps)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validating = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        every = trainer.val_check_batch if isinstance(trainer.val_check_batch, int) else trainer.max_steps
        self.pace.paused("validation", every, time.monotonic() - self.validating)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the bar at the step where training starts. For a resumed run this is not 0."""
        terminal, self.unit = sys.stderr.isatty(), "sounds" if hasattr(pl_module, "voice") else "pictures"
        self.bar = progress(
            total=trainer.max_steps,
            initial=trainer.global_step,
            disable=not trainer.is_global_zero,
            delay=0,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps [{elapsed}<{desc}",
            desc="?]",
        )
        if not hasattr(self, "pace"):
            self.on_sanity_check_start(trainer, pl_module)
        self.often = 0.5 if terminal else 20  # seconds between two states of the bar
        self.started = self.shown = time.monotonic()
        self.first, self.before = trainer.global_step, 0.0
        if self.first and self.record is not None:
            self.record.take_up(self.first)
            self.before = max((row.get("seconds", 0.0) for row in self.record.rows.values()), default=0.0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if (
            self.bar is not None
            and trainer.global_step == self.first
            and phase_strategy(trainer).steps.watch.schedule.times
        ):
            self.bar.set_description_str("?] trying the first step; --check false skips it")
            self.shown = 0.0  # the next state shows its end

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Read the losses from the device only when the bar is drawn, because reading waits for the device."""
        self.pace.stepped()
        if private.logs_are_due(trainer):
            pl_module.log_dict(self._so_far(trainer))
        if self.bar is None:
            return
        self.bar.n += 1
        if time.monotonic() - self.shown > self.often:
            self._show(trainer)
            self.bar.refresh()
        if self.lines and trainer.global_step % self.lines == 0:
            told = self.line(trainer)
            self.bar.write(told, file=sys.stdout) if sys.stderr.isatty() else say(told)

    def _show(self, trainer: Trainer) -> None:
        assert self.bar is not None
        self.shown, left = time.monotonic(), self.pace.left()
        ends = "?" if left is None else tqdm.format_interval(left)
        speed = f"{_number(self.speed(trainer))} {self.unit}/s | " if self.pictures is not None else ""
        losses = _losses(phase_strategy(trainer).steps.logged.losses)  # last: a narrow terminal cuts them off
        self.bar.set_description_str(f"{ends}] {speed}{losses}", refresh=False)

    def speed(self, trainer: Trainer) -> float:
        """Pictures a second since training began here, with all that came between steps."""
        assert self.pictures is not None
        return (trainer.global_step - self.first) * self.pictures / (time.monotonic() - self.started)

    def line(self, trainer: Trainer) -> str:
        step, left, parts = trainer.global_step, self.pace.left(), []
        if self.pictures is not None:
            speed, thousand = self.speed(trainer), "kimg" if self.unit == "pictures" else f"thousand {self.unit}"
            parts.append(f"{_number(step * self.pictures / 1000)} {thousand}")
            parts.append(f"{_number(speed)} {self.unit}/s ({_number(1000 / speed)} s/{thousand})")
        if (memory := peak_memory(trainer.strategy.root_device)) is not None:
            parts.append(f"{memory / 1e9:.2f} GB a rank")
        if left is not None and step < trainer.max_steps:
            parts.append(f"{tqdm.format_interval(left)} to go")
        return f"step {step} of {trainer.max_steps}: {', '.join(parts)}"

    def _so_far(self, trainer: Trainer) -> dict[str, float]:
        now = {"seconds": self.before + time.monotonic() - self.started}
        return now if self.pictures is None else {**now, self.unit: float(trainer.global_step * self.pictures)}

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the last state on the screen, and in the row of the last step what the whole training took."""
        if trainer.global_step == trainer.max_steps:
            metrics.log(trainer, self._so_far(trainer))
        if self.bar is not None:
            self._show(trainer)
            self.bar.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the bar, so that the error message has a line of its own."""
        if self.bar is not None:
            self.bar.close()


def _number(value: float) -> str:
    """Three digits or more, and no powers of ten."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


@contextmanager
def between_steps(trainer: Trainer, name: str, every: int) -> Iterator[None]:
    """The `with` is what a callback does every so many steps: the time to the end then has it too."""
    began = time.monotonic()
    yield
    bar = trainer.progress_bar_callback
    if isinstance(bar, Bar) and hasattr(bar, "pace"):
        bar.pace.paused(name, every, time.monotonic() - began)


@contextmanager
def computing(trainer: Trainer, game: Any, name: str, every: int, averaged: bool = True) -> Iterator[Bring]:
    """Inside the `with`, a callback computes with a game between two steps, so that training does not notice.

    Networks are in evaluation mode, without gradients, with averaged weights if asked for. Gives a function that brings
    a batch to the device. All ranks must enter, because a sharded player needs them all.
    """
    modes = [(module, module.training) for module in game.modules()]
    game.eval()
    try:
        with (
            between_steps(trainer, name, every),
            torch.no_grad(),
            random_state.untouched(),
            game.averaged() if averaged else phase_strategy(trainer).gathered(),
            trainer.precision_plugin.forward_context(),
        ):
            yield lambda batch: trainer.precision_plugin.convert_input(trainer.strategy.batch_to_device(batch))
    finally:
        for module, mode in modes:
            module.training = mode


def peak_memory(device: torch.device) -> float | None:
    """The most bytes that this rank has had: of tensors on an accelerator, else of the process."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return None if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _losses(losses: dict[str, Tensor]) -> str:
    phases: dict[str, list[str]] = {}
    for name, loss in losses.items():
        phase, _, label = name.rpartition("/")
        if not label.endswith("_grad_norm"):
            own = "" if label == phase else f"{label} "  # a loss that is called as its phase is named once
            phases.setdefault(phase, []).append(f"{own}{loss.item():.3f}")
    return " | ".join(f"{phase}: {' '.join(parts)}" for phase, parts in phases.items())
