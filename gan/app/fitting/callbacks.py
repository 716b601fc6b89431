"""The callbacks of `gan.fit` for pictures, validation and settings; pace, keep, health and scores have files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from PIL import Image
from torch import Tensor

from gan.app.fitting import loggers, metrics
from gan.app.fitting.card import old_settings
from gan.app.fitting.metrics import best_effort, warn
from gan.app.fitting.pace import computing
from gan.app.outputs import say
from gan.app.run.folder import RunFolder
from gan.app.run.reopen import batches_of, first_samples, loaders_ready, shown_columns
from gan.app.sampling import grids
from gan.files.disk import write_whole
from gan.files.errors import this_rank
from gan.games.from_noise import FromNoise
from gan.ranks import alone
from gan.runs import Run
from strategies import private
from strategies.batches import random_state
from strategies.processes.stopping import Stopped
from strategies.strategy import phase_strategy

SHOWN = 8
PAGE = 64  # pictures


def _are_pictures(value: Any) -> bool:
    """Whether a column of a batch has pictures or label maps, and no spectrograms or features, say."""
    return isinstance(value, Tensor) and (
        (value.ndim == 4 and value.shape[1] <= 4) or (value.ndim == 3 and value.dtype == torch.int64)
    )


class Pictures(Callback):
    """Draws the same held-out samples every `every` steps, with averaged weights, and the curves with them.

    Without `show(batch)`, or if nothing is held out, only the curves are drawn; but what draws from noise shows seeds
    anyway. What cannot be written is left out.
    """

    def __init__(self, folder: RunFolder, log: metrics.Record, every: int) -> None:
        self.folder, self.record, self.every = folder, log, every
        self.batch: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the samples. A new run also draws the reals, and a grid of its untrained networks."""
        source = trainer.datamodule or pl_module  # pyrefly: ignore[missing-attribute] - Lightning sets it
        self.choose(trainer, pl_module, source)
        if self.batch is not None and trainer.global_step == 0:
            self._draw(trainer, pl_module)

    def choose(self, trainer: Any, game: Any, source: Any) -> None:
        """Choose the samples, and before the first step draw the reals. `source` has the loaders."""
        with random_state.untouched():
            if hasattr(game, "show"):
                self.batch = first_samples(batches_of(source), SHOWN)
                if self.batch is None and isinstance(game, FromNoise):  # it shows seeds, as many as these
                    self.batch = first_samples(batches_of(source, "train"), SHOWN)
                if self.batch is None:
                    say("no grids: they show held-out samples, and there are none")
        named = self.batch.items() if isinstance(self.batch, dict) and trainer.global_step == 0 else ()
        reals = {name.replace("_", " "): x for name, x in named if _are_pictures(x)}
        if list(reals) == ["image"] and trainer.is_global_zero:
            with random_state.untouched():
                batch = first_samples(batches_of(source, "train"), PAGE)
            pictures = (batch if isinstance(batch, dict) and "image" in batch else self.batch)["image"]
            cells = [grids.enlarged(grids.picture(sample), grids.CELL) for sample in pictures]
            self._write(trainer, grids.tiles(cells, 8, grids.MARGIN), "reals.png")
        elif reals:
            self._save(trainer, reals, "reals.png")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        due = trainer.global_step % self.every == 0 or trainer.global_step == trainer.max_steps
        if due and self.batch is not None:
            self._draw(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Draw the curves before the next step: what the last one logs, and its validation, come after its grid."""
        if trainer.global_step and trainer.global_step % self.every == 0:
            self._curves(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._curves(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, Stopped):
            self._curves(trainer)

    def _draw(self, trainer: Trainer, game: Any) -> None:
        # All ranks compute, because a sharded player needs them all. Every grid gets the same noise.
        with computing(trainer, game, "grid", self.every) as prepared:
            self._save(trainer, shown_columns(game, prepared(self.batch)), f"step-{trainer.global_step:06d}.png")

    def _save(self, trainer: Any, columns: Mapping[str, grids.Batch], name: str) -> None:
        if trainer.is_global_zero:
            self._write(trainer, grids.grid(columns, SHOWN), name)
            with best_effort(self.folder.samples / name, "pictures"):
                grids.save_sounds(columns, self.folder.samples / name)

    def _write(self, trainer: Any, picture: Image.Image, name: str) -> None:
        path = self.folder.samples / name
        with best_effort(path, "pictures"):
            path.parent.mkdir(exist_ok=True)
            write_whole(path, grids.png(picture))
        loggers.show(trainer, "reals" if name == "reals.png" else "grid", picture)

    def _curves(self, trainer: Trainer) -> None:
        if trainer.is_global_zero and (found := metrics.panels(self.record.rows)):
            with best_effort(self.folder.curves):
                kimg, words = metrics.clock(self.record.rows)
                title = f"{self.folder.path.name}: {words}" if words else self.folder.path.name
                write_whole(
                    self.folder.curves, metrics.drawn(found, "png", title, kimg, changes=old_settings(self.folder))
                )


def dry_reals(run: Run, folder: RunFolder) -> Path | None:
    """Draw the reals of a run that is not trained, and say where: None if it shows none."""
    with alone(), loaders_ready(run) as source:
        trainer = SimpleNamespace(global_step=0, is_global_zero=this_rank() == 0, loggers=[])
        Pictures(folder, metrics.Record(folder), 1).choose(trainer, run.game, source)
    path = folder.samples / "reals.png"
    return path if path.exists() else None


class Score(Callback):
    """Lets metrics.csv have a run's scores before its first step and after its last one."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the scores of untrained networks: Lightning validates before the first step, and does not log that."""
        if trainer.sanity_checking:
            found = trainer.callback_metrics
            if scores := {name: float(found[name]) for name in self.names if name in found}:
                metrics.log(trainer, scores)
            absent, logged = ", ".join(name for name in self.names if name not in found), ", ".join(found) or "nothing"
            if absent and trainer.is_global_zero:
                warn(f"the run names {absent} as a score, and validation has logged {logged}; no such score is kept")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Validate and log the last step too, also when it is not one of the regular ones."""
        if trainer.global_step == trainer.max_steps - 1:
            trainer.should_stop = True


class Rates(Callback):
    """Logs the learning rates of all players by their names. Lightning's own callback has names for schedules only."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if private.logs_are_due(trainer):
            updaters, found = phase_strategy(trainer).players.updaters(), dict[str, float]()
            for name, groups in ((name, updater.optimizer.param_groups) for name, updater in updaters.items()):
                for number, group in enumerate(groups, 1):
                    found[f"{name}/{group.get('name', f'pg{number}')}" if len(groups) > 1 else name] = group["lr"]
            for logger in trainer.loggers:
                logger.log_metrics(found, trainer.global_step)


def write_settings(texts: Mapping[Path, str], trainer: Trainer, game: LightningModule) -> None:
    """Write the run's files of settings when training begins: `texts` gives the text of each file.

    It must not write earlier. If a resumed run were refused after that, the new settings would stay in its folder.
    They might not fit its checkpoints, and the run could no longer be resumed or sampled. So this is in the last
    callback: Lightning lets no rank come here before all ranks have read the old settings and the checkpoint.
    """
    if trainer.is_global_zero:
        for path, text in texts.items():
            metrics.write(path, text)


def write_lost_settings(texts: Mapping[Path, str], trainer: Trainer, game: LightningModule, *_: object) -> None:
    """Write them again where the run's folder was removed or renamed while it trains.

    The next checkpoint makes the folder anew, and could not be resumed from without its settings.
    """
    folder = next(iter(texts)).parent
    if trainer.is_global_zero and not any(path.exists() for path in texts):
        warn(f"'{folder}' is not there any more, and is made anew; what it held is where somebody has moved it")
        folder.mkdir(parents=True, exist_ok=True)
        write_settings(texts, trainer, game)
