"""`--score-every`: how far the pictures that a game makes are from true ones, while it trains."""

from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import default_collate

from datasets.augment import Prepared
from datasets.loaders import GanData
from gan.app.fitting.keep import Keep
from gan.app.fitting.metrics import log, write_json
from gan.app.fitting.pace import Bring, computing
from gan.app.outputs import say
from gan.app.run.folder import RunFolder
from gan.app.scoring.features import Known, best
from gan.app.scoring.names import HELD_OUT, TRAINED_ON
from gan.app.scoring.outputs import Made
from gan.app.scoring.scorer import Scorer
from gan.app.scoring.scoring import Scoring, play, to_make
from gan.files.errors import UserError
from gan.runs import Run
from strategies.strategy import phase_strategy
from strategies.world import World

SCORES = ("features", "precision", "recall")
PIXELS = 2**22  # in a batch, at most: it does not depend on the number of ranks, or the scores would


class Scores(Callback):
    """Scores the run before its first step, every `every` steps and at its end: in metrics.csv and in scores.json.

    `count` pictures that the game makes are compared with all that it trains on, as published, without mirroring. A
    game that paints its held-out samples is compared with those. What is known of the true pictures is computed once.
    This callback comes after `keep`, which has saved the step by then.
    """

    def __init__(self, folder: RunFolder, run: Run, scorer: Scorer, every: int, keep: Keep, count: int | None) -> None:
        if not isinstance(run.data, GanData):
            raise UserError("--score-every needs samples with numbers: give the run a GanData")
        self.folder, self.data, self.scorer, self.every, self.keep = folder, run.data, scorer, every, keep
        self.asked = count
        self.known: dict[str, Known] | None = None  # of the true pictures by title, on the first rank

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == 0:
            self._score(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step % self.every == 0 or trainer.global_step == trainer.max_steps:
            self._score(trainer, pl_module)

    def _score(self, trainer: Trainer, game: LightningModule) -> None:
        with computing(trainer, game, "scores", self.every) as prepared:
            found, how = self._figures(phase_strategy(trainer).world, game, prepared)
        if not trainer.is_global_zero:
            return
        if trainer.global_step == 0:
            say(f"scores: {how['pictures made']:,} pictures made, against {how['true']}")
        log(trainer, found)
        self.keep.note(trainer, found)
        write_json(self.folder.scores, {"step": trainer.global_step, "scores": found, "how": how})

    def _figures(self, world: World, game: Any, prepared: Bring) -> tuple[dict[str, float], dict[str, Any]]:
        """The scores by their names in metrics.csv, and how they were computed."""
        samples, true = self.data.train, TRAINED_ON
        shown = play(game, range(1), prepared(default_collate([Prepared(samples)[0, 0]])), 1)
        made = [each for each in shown.values() if isinstance(each, Made)]
        if len(made) < len(shown):
            raise UserError(f"--score-every compares pictures, and {type(game).__name__} makes sounds; leave it out")
        if any(each.paired for each in made):
            samples, true = self.data.val, HELD_OUT
            if samples is None:
                raise UserError("--score-every compares with held-out samples here; type --held-out 0.02")
        rows = max(8, min(64, PIXELS // max(each.pictures[0, 0].numel() for each in made)))
        count, scorer = to_make(shown, samples, self.asked), self.scorer.to(world.device)
        scoring = Scoring(game, scorer, prepared, world)
        found, self.known = scoring.against_all(samples, count, rows, self.data.workers, self.known)
        figures: dict[str, float] = {}
        for title, seen in found.items():
            for name, value in seen.items():
                figures[f"score/{name}"] = figures.get(f"score/{name}", 0.0) + value / len(found)  # to choose by
                figures |= {f"score/{title}: {name}": value} if len(found) > 1 else {}
        averaged = [name for name, player in game.players.items() if player.ema is not None]
        how = {"pictures made": count, "true": f"{len(samples)} {true}", "averaged weights of": averaged}
        return figures, how | scorer.about(count, len(samples))


def scorer_of(settings: Namespace) -> Scorer | None:
    if settings.score_every is None:
        return None
    extractor = best(settings.inception and Path(settings.inception))
    if not extractor.fid:
        say(f"no FID without Inception's weights (--inception torch-fidelity): distances are by {extractor.name}")
    return Scorer(SCORES, extractor=extractor)


def names_of(scorer: Scorer | None) -> tuple[str, ...]:
    """The names of the scores in metrics.csv: where a game makes several kinds of pictures, of their means."""
    if scorer is None or scorer.extractor is None:
        return ()
    return tuple(f"score/{name}" for name in (*scorer.extractor.names, "precision", "recall"))
