"""`--score-every`: how far the pictures that a game makes are from true ones, while it trains."""

import json
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from gan.app.outputs import say
from gan.app.run.folder import RunFolder
from gan.app.scoring.features import best
from gan.app.scoring.sets import Sets
from gan.app.training.computing import computing, log
from gan.app.training.keep import Keep
from gan.app.training.metrics import Spare
from gan.app.training.pace import between_steps
from gan.files.disk import whole_file
from gan.runs import Run
from strategies.strategy import phase_strategy


class Scores(Callback):
    """Scores the run before its first step, every `every` steps and at its end: in metrics.csv and in scores.json.

    scores.json has the last ones, and how they were computed. This callback comes after `keep`, which has saved the
    step by then.
    """

    def __init__(self, folder: RunFolder, sets: Sets, every: int, keep: Keep) -> None:
        self.folder, self.sets, self.every, self.keep = folder, sets, every, keep
        self._spare = Spare()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Score the untrained networks of a new run."""
        if trainer.global_step == 0:
            self._score(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Score where it is due."""
        if trainer.global_step % self.every == 0 or trainer.global_step == trainer.max_steps:
            self._score(trainer, pl_module)

    def _score(self, trainer: Trainer, game: LightningModule) -> None:
        with between_steps(trainer, "scores", self.every), computing(trainer, game) as prepared:
            found = self.sets.figures(phase_strategy(trainer).world, prepared, game)
        if not trainer.is_global_zero:
            return
        log(trainer, found)
        self.keep.note(trainer, found)
        with self._spare.trying(self.folder.scores), whole_file(self.folder.scores) as part:
            said = {"step": trainer.global_step, "scores": found, "how": self.sets.about}
            part.write_text(json.dumps(said, indent=1) + "\n", "utf-8")


def sets_of(settings: Namespace, run: Run) -> Sets | None:
    """What --score-every compares; None without it. Refuses what cannot be compared, before anything is trained."""
    if settings.score_every is None:
        return None
    statistics = settings.statistics and Path(settings.statistics)
    extractor = best(settings.inception and Path(settings.inception))
    if not extractor.fid:
        say(f"no FID without Inception's weights (--inception): scores are distances by {extractor.name}")
    return Sets(run, extractor, settings.score_count, statistics)
