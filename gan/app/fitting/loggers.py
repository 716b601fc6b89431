"""`--logger`: what a run also tells TensorBoard, Weights & Biases or MLflow, beside the files in its folder.

trained.json in the run's folder has the names by which they know the run: a resumed run goes on under the same ones.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from secrets import token_hex
from typing import Any

import numpy as np
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import Logger
from PIL import Image

from gan.app.fitting.card import UNTIL, card, old_settings, run_notes
from gan.app.fitting.metrics import Record, warn, write_json
from gan.app.run.folder import RunFolder
from gan.app.run.parser import items
from gan.app.run.reopen import has_numbers
from gan.app.run.resumed import Resumed
from gan.files.errors import UserError, markdown, reason
from gan.runs import Run
from strategies.accelerator import name_of


class Beside(Logger):
    """A logger beside the run's metrics.csv. If it cannot begin, that is an error; later failures end nothing else."""

    kind = advice = ""
    _begun = _failed = False

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Inside the `with`, the service is told something. What it may raise is not known."""
        try:
            yield
        except UserError:
            raise
        except Exception as error:
            if not self._begun:
                raise UserError(f"--logger {self.kind} cannot begin: {reason(error)}; {self.advice}") from error
            if not self._failed:
                self._failed = True
                warn(f"--logger {self.kind} has failed ({reason(error)}); training goes on")

    @property
    def experiment(self) -> Any:
        """The run as the service knows it. Lightning asks for it before anything is trained."""
        with self.trying():
            found = super().experiment  # pyrefly: ignore[missing-attribute] - of Lightning's class
            self._begun = True
            return found

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log under the number of the row of metrics.csv."""
        with self.trying():
            super().log_metrics(dict(metrics), step + 1)  # pyrefly: ignore[missing-attribute] - of Lightning's class

    def finalize(self, status: str) -> None:
        with self.trying():
            super().finalize(status)


class TensorBoard(Beside, TensorBoardLogger):
    """Events in the run's folder. A resumed run hides those that were logged after its checkpoint."""

    kind, advice = "tensorboard", "see whether the run's folder can be written"

    def __init__(self, folder: RunFolder, known: str | None, step: int | None) -> None:
        super().__init__(folder.path, "", "tensorboard", default_hp_metric=False, purge_step=step and step + 1)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log the settings as text: as TensorBoard's own hyperparameters they would need a metric."""
        self.experiment.add_text("settings", markdown(["setting", "value"], params.items()), 0)

    def picture(self, name: str, picture: Image.Image, step: int) -> None:
        self.experiment.add_image(name, np.asarray(picture), step, dataformats="HWC")

    def card(self, text: str, step: int) -> None:
        self.experiment.add_text("card", text, step)


class Wandb(Beside, WandbLogger):
    """A run of Weights & Biases, whose notes are the card. Without a connection: WANDB_MODE=offline."""

    kind, advice = "wandb", "type wandb login, or WANDB_MODE=offline before the command"

    def __init__(self, folder: RunFolder, known: str | None, step: int | None) -> None:
        project = os.environ.get("WANDB_PROJECT", "gan")
        super().__init__(folder.path.name, folder.path, known or token_hex(4), project=project)

    def picture(self, name: str, picture: Image.Image, step: int) -> None:
        self.log_image(name, [picture], step - 1)  # which calls log_metrics

    def card(self, text: str, step: int) -> None:
        self.experiment.notes = text

    def finalize(self, status: str) -> None:
        super().finalize(status)
        with self.trying():
            self.experiment.finish(0 if status == "success" else 1)


class MLflow(Beside, MLFlowLogger):
    """A run of MLflow, whose description is the card: on MLFLOW_TRACKING_URI, or in mlflow/ beside the run's folder."""

    kind, advice = "mlflow", "see whether MLFLOW_TRACKING_URI is right"

    def __init__(self, folder: RunFolder, known: str | None, step: int | None) -> None:
        place = folder.path.absolute().parent / "mlflow"
        server, files = os.environ.get("MLFLOW_TRACKING_URI"), None
        if not server:
            place.mkdir(exist_ok=True)
            server, files = f"sqlite:///{place}/mlflow.db", place.as_uri()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "gan")
        with self.trying():
            super().__init__(name, folder.path.name, server, artifact_location=files, run_id=known)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Log those settings that are new: MLflow refuses to change one."""
        self.experiment.update_run(self.run_id, "RUNNING")
        known = self.experiment.get_run(self.run_id).data.params
        super().log_hyperparams({name: value for name, value in params.items() if name not in known})

    def picture(self, name: str, picture: Image.Image, step: int) -> None:
        self.experiment.log_image(self.run_id, picture, key=name, step=step)

    def card(self, text: str, step: int) -> None:
        self.experiment.set_tag(self.run_id, "mlflow.note.content", text)


KINDS = {each.kind: each for each in (TensorBoard, Wandb, MLflow)}


def kinds(typed: str | None) -> list[str]:
    """The loggers that are typed, each once; not csv, which is always there. Refuses those whose packages are not."""
    names = [name for name in items(typed or "") if name in KINDS]
    for name in names:
        if find_spec(name) is None:
            raise UserError(f"--logger {name} needs its package: pip install '.[{name}]', or pip install {name}")
    return names


def made(typed: str | None, folder: RunFolder, step: int | None) -> list[Beside]:
    """The loggers that are typed, for a run that begins at this step or, without one, is new."""
    return [KINDS[name](folder, run_notes(folder).get(name), step) for name in kinds(typed)]


def beside(trainer: Trainer) -> list[Any]:
    """On the first rank, the loggers beside metrics.csv; on others none."""
    return [logger for logger in trainer.loggers if isinstance(logger, Beside)] if trainer.is_global_zero else []


def show(trainer: Trainer, name: str, picture: Image.Image) -> None:
    """Let all of them have a picture of the last step."""
    for logger in beside(trainer):
        with logger.trying():
            logger.picture(name, picture, trainer.global_step)


@dataclass(eq=False)
class Track(Callback):
    """Gives them the run's settings at its begin, and its card at its end. trained.json notes what both will need."""

    folder: RunFolder
    run: Run
    computer: str
    record: Record
    settings: Mapping[str, Any]
    resumed: Resumed | None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        name = name_of(trainer.strategy.root_device)
        words = self.computer if name == "cpu" else f"{self.computer} ({name})"
        known, step = run_notes(self.folder), trainer.global_step
        now = {"computer": f"{words}, torch {torch.__version__}"}
        if has_numbers(self.run.data):
            now["samples"] = f"{len(self.run.data.train):,} to train on"
        later = [known.pop(f"{UNTIL}{at}") for at in old_settings(self.folder) if at > step]
        if step and self.resumed is not None:
            was = [self.resumed.as_it_was(known.get("settings", ""))] if self.resumed.changed else []
            was += [known[name] for name, words in now.items() if known.get(name, words) != words]
            if later or was:  # from before a change: as it was
                known[f"{UNTIL}{step}"] = later[0] if later else ", ".join(was)
        known |= {**now, "settings": self.run.words}
        for logger in beside(trainer):
            with logger.trying():
                logger.log_hyperparams(dict(self.settings))
                known[logger.kind] = str(logger.version)
        write_json(self.folder.trained, known)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in beside(trainer):
            with logger.trying():
                self.record.save()
                logger.card(card(self.folder, self.run, trainer.global_step, self.settings), trainer.global_step)
