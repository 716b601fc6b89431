"""What `gan.fit` adds to a Lightning Trainer: a bar, pictures, the score, and an end that loses nothing."""

import signal
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ProgressBar
from torch import Tensor
from tqdm import tqdm

from gan.fit import metrics as record
from gan.fit.folder import RunFolder, write
from gan.painting import grids as pictures
from strategies import random_state
from strategies.micro_batches import rows
from strategies.processes.stopping import SIGNALS, Ending, Signals

SHOWN = 8
KEPT = 2  # checkpoints


class Bar(ProgressBar):
    """One bar for the whole run: the losses of each phase, and images per second over all ranks."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.bar: tqdm | None = None

    def disable(self) -> None:
        """Lightning calls this on all ranks but the first."""
        self.bar = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start where training starts, which for a resumed run is not at 0."""
        terminal = sys.stderr.isatty()
        self.bar = tqdm(
            total=trainer.max_steps,
            initial=trainer.global_step,
            unit="step",
            disable=not trainer.is_global_zero,
            dynamic_ncols=True,
            mininterval=0.5 if terminal else 20,
            maxinterval=60,
        )
        self.started, self.first = time.monotonic(), trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Losses are read from the device only when the bar is drawn."""
        if self.bar is not None and self.bar.update(1):
            speed = (trainer.global_step - self.first) * self.batch_size / (time.monotonic() - self.started)
            self.bar.set_postfix_str(f"{_losses(trainer.strategy.losses)} | {speed:.0f} images/s", refresh=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the last state on the screen."""
        if self.bar is not None:
            self.bar.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Make room for the message."""
        self.on_train_end(trainer, pl_module)


def _losses(losses: dict[str, Tensor]) -> str:
    phases: dict[str, list[str]] = {}
    for name, loss in losses.items():
        phase, _, label = name.rpartition("/")
        if not label.endswith("_grad_norm"):
            phases.setdefault(phase, []).append(f"{label} {loss.item():.3f}")
    return " | ".join(f"{phase}: {' '.join(parts)}" for phase, parts in phases.items())


class Pictures(Callback):
    """Draws the same held-out samples every so many steps, with averaged weights, and the curves beside them."""

    def __init__(self, folder: RunFolder, log: record.Record, every: int) -> None:
        self.folder, self.record, self.every = folder, log, every
        self.batch: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The reals, and what the untrained networks make."""
        batches: list[dict[str, Tensor]] = []
        with random_state.untouched():
            for batch in trainer.datamodule.val_dataloader():
                batches.append({name: value for name, value in batch.items() if isinstance(value, Tensor)})
                if sum(map(rows, batches)) >= SHOWN:
                    break
        self.batch = {name: torch.cat([batch[name] for batch in batches])[:SHOWN] for name in batches[0]}
        if trainer.global_step == 0:
            reals = {name.replace("_", " "): value for name, value in self.batch.items() if value.ndim >= 3}
            self._save(trainer, reals, "reals.png")
            self._draw(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """A grid and the curves, every so many steps and at the end."""
        if trainer.global_step % self.every == 0 or trainer.global_step == trainer.max_steps:
            self._draw(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The curves once more, with the last validation."""
        self._curves(trainer)

    @torch.no_grad()
    def _draw(self, trainer: Trainer, game: Any) -> None:
        # All ranks compute, because a sharded player needs them all; the same noise in every grid.
        modes = [(module, module.training) for module in game.modules()]
        game.eval()
        with random_state.untouched(), game.averaged(), trainer.precision_plugin.forward_context():
            random_state.reseed(0)
            batch = trainer.strategy.batch_to_device(self.batch)
            columns = game.show(trainer.precision_plugin.convert_input(batch))
        for module, mode in modes:
            module.training = mode
        self._save(trainer, columns, f"step-{trainer.global_step:06d}.png")
        self._curves(trainer)

    def _save(self, trainer: Trainer, columns: dict[str, Tensor], name: str) -> None:
        if trainer.is_global_zero:
            pictures.save(pictures.grid(columns, SHOWN), self.folder.samples / name)

    def _curves(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            record.draw_curves(self.record.rows, self.folder.curves, self.folder.path.name)


class Score(Callback):
    """Remembers the first and the last value of each of a run's scores, also over interruptions."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning validates once before the first step, so the first values are the untrained networks'."""
        found = trainer.callback_metrics
        self.last |= {name: float(found[name]) for name in self.names if name in found}
        if self.last and not self.first:
            self.first = dict(self.last)
            for logger in trainer.loggers:
                logger.log_metrics(self.first, 0)  # Lightning logs nothing of that validation

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """The last step is validated, wherever it falls between the regular validations."""
        if trainer.global_step == trainer.max_steps:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, dict[str, float]]:
        """Both values of each."""
        return {"first": self.first, "last": self.last}

    def load_state_dict(self, state: dict[str, dict[str, float]]) -> None:
        """Both values of each."""
        self.first, self.last = dict(state["first"]), dict(state["last"])


class Written(Callback):
    """Writes down the settings that a run goes on with, once it does: the last callback, before the first step.

    Not before: a command that is refused would leave settings that the run's checkpoints do not fit, and the run could
    no longer be resumed or sampled. By now every rank has read the settings of before, and the checkpoint.
    """

    def __init__(self, texts: Mapping[Path, str]) -> None:
        self.texts = texts

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning lets no rank begin before all have loaded."""
        if trainer.is_global_zero:
            write(self.texts)


class Keep(Callback):
    """Saves every so many steps, at the end, on Ctrl-C or a signal to end, and when the guard gives up.

    By hand, because ModelCheckpoint cannot be asked to save at a moment of ours. A signal reaches one rank or all, at
    any moment; all save together after the same step, and the strategy ends the run before the next: see
    strategies/processes/stopping.py. A second Ctrl-C ends at once.

    The newest two checkpoints that this run wrote are kept. What it did not write stays: a copy under a name of a
    person's own, or later steps where a run goes on from an earlier one. The steps that were written are in the
    checkpoint, for those who resume; where one is older than that, the run wrote what the folder has up to its step.
    """

    def __init__(self, folder: RunFolder, every: int) -> None:
        self.folder, self.every = folder, every
        self.ending: Ending | None = None
        self.signals = Signals()
        self.wrote: list[int] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning has set its handlers by now; put ours in their place."""
        self.ending = trainer.strategy.ending
        if self.wrote is None:
            there = self.folder.steps() if trainer.global_step else ()
            self.wrote = [step for step in there if step <= trainer.global_step]
        self.signals.take((signal.SIGINT, *SIGNALS), self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.ending.wished and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.ending.wish()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save between two steps, never inside one."""
        step = trainer.global_step
        due = step % self.every == 0 or step == trainer.max_steps
        ends = self.ending.look() or trainer.strategy.guard.hopeless
        if due or ends:
            self.save(trainer)

    def save(self, trainer: Trainer) -> None:
        """Write this step's checkpoint, then remove what this run wrote before the last one."""
        step = trainer.global_step
        self.wrote = [*(other for other in self.wrote if other < step), step]
        trainer.save_checkpoint(self.folder.checkpoint(step))
        if trainer.is_global_zero:
            for older in self.wrote[:-KEPT]:
                trainer.strategy.remove_checkpoint(self.folder.checkpoint(older))
        self.wrote = self.wrote[-KEPT:]

    def state_dict(self) -> dict[str, list[int]]:
        """The steps that this run wrote checkpoints of, and may remove."""
        return {"wrote": list(self.wrote or ())}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        """Those of the run that is gone on with."""
        self.wrote = list(state["wrote"])

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """All is saved. Lightning's handlers are back before Lightning takes them down."""
        self.signals.give_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Also after a failure."""
        self.signals.give_back()
