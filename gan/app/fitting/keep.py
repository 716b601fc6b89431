"""When `gan.fit` saves, which checkpoints it keeps, and what Ctrl-C does."""

import json
import math
import signal
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from gan.app.fitting import start
from gan.app.fitting.metrics import best_effort, warn, write_json
from gan.app.fitting.pace import between_steps
from gan.app.run.folder import RunFolder
from gan.files.errors import DiskError, UserError
from strategies.checkpoint.folders import remove
from strategies.processes.stopping import SIGNALS, Ending, handle, tell
from strategies.strategy import phase_strategy


class Keep(Callback):
    """Saves a checkpoint every `every` steps, at the end, on Ctrl-C or another signal to end, and when the guard stops.

    It is written by hand, because Lightning's ModelCheckpoint cannot save at such a moment. A signal may reach one rank
    or all, at any time. All ranks save after the same step, and the strategy ends the run before the next one (see
    strategies/processes/stopping.py). A second Ctrl-C ends the run at once.

    Training goes on while a checkpoint is written, unless `in_background` is false or the run ends here.

    [Note: what is kept]
    The newest checkpoints that this run wrote are kept, and so many of the best ones, if that is wished. Its others are
    removed, each when a newer one is whole. Checkpoints that it did not write stay: copies that the user made, and
    those of later steps, if the run was resumed from an earlier one. So each checkpoint holds the list of steps that
    the run wrote.

    [Note: a full disk]
    If a checkpoint cannot be written, nothing is removed, all ranks train on, and try again at the next save. Whether
    the last one was saved is told at the end.
    """

    def __init__(
        self, folder: RunFolder, every: int, in_background: bool = True, newest: int = 2, best: int = 0, score: str = ""
    ) -> None:
        """Keep the `newest` checkpoints and the `best` by `score`. Lower is better, but of precision and recall."""
        self.folder, self.every, self.in_background, self.newest = folder, every, in_background, newest
        self.best, self.score = best, score
        self.scores = self._saved_scores() if best else {}  # of the validation after a step's checkpoint
        self.ending: Ending  # of the strategy, when training begins
        self.signals = ExitStack()  # closed, it puts Lightning's handlers back
        self.wrote: list[int] = []  # the steps whose checkpoints are there or being written
        self.failed: DiskError | None = None  # of the last save

    # ---- signals ----

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's signal handlers, which are set by now."""
        self.ending, self._began, self._pressed = phase_strategy(trainer).ending, trainer.global_step, False
        self.signals = handle((signal.SIGINT, *SIGNALS), partial(self._note, trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put Lightning's handlers back, before Lightning removes them."""
        self.signals.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.signals.close()

    def _note(self, trainer: Trainer, number: int, frame: FrameType | None) -> None:
        pressed, heard = number == signal.SIGINT, self.ending.wished
        if pressed and self._pressed:
            phase_strategy(trainer).end_at_once(self._lost(trainer.global_step))
        self._pressed |= pressed
        if trainer.is_global_zero and (pressed or not heard):
            again = "; another Ctrl-C ends at once, without saving" if pressed else ""
            tell(f"ending after this step, and saving{again}")
        self.ending.wish(number)

    def _lost(self, step: int) -> str:
        """What an end after this step costs if it is not saved."""
        there = self._there()
        lost = step - max([self._began, *there])
        what = f"{self.folder.checkpoint(there[-1])} remains" if there else "this run has saved nothing yet"
        return f"ended at step {step} without saving: {lost} step{'' if lost == 1 else 's'} lost, {what}"

    # ---- saving ----

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        """Save where it is due. This is between two steps, never inside one."""
        step = trainer.global_step
        due = step % self.every == 0 or step == trainer.max_steps
        ends = self.ending.look() or phase_strategy(trainer).steps.guard.verdict is not None
        if due or ends:
            with between_steps(trainer, "checkpoint", self.every):
                self.save(trainer, self.in_background and not ends and step != trainer.max_steps)

    def save(self, trainer: Trainer, in_background: bool) -> None:
        """Save this step's checkpoint. When it is whole, remove those that are not kept any more."""
        phase_strategy(trainer).background.wait()
        step, before = trainer.global_step, self._there()
        self.wrote, self.failed = [*(other for other in before if other < step), step], None
        self.scores.pop(step, None)
        path, missed = self.folder.checkpoint(step), partial(self._missed, trainer, step)
        if trainer.is_global_zero:
            with best_effort(self.folder.launch):
                start.note_checkpoint(self.folder, path)
        if in_background:
            phase_strategy(trainer).save_in_background(path, missed)
        else:
            try:
                trainer.save_checkpoint(path)
            except DiskError as error:
                missed(error)
        self._remove_others(trainer)

    def _missed(self, trainer: Trainer, step: int, error: DiskError) -> None:
        """See [Note: a full disk]. All ranks call it, also in the thread that writes."""
        self.failed, self.wrote = error, [other for other in self.wrote if other != step]
        if trainer.is_global_zero:
            there = self._there()
            older = f"{self.folder.checkpoint(there[-1]).name} remains" if there else "there is none before it"
            warn(f"{error}; {older}, training goes on, and the next save tries again")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.note(trainer, trainer.callback_metrics)

    def note(self, trainer: Trainer, found: Mapping[str, Any]) -> None:
        """Note the score of the step that was saved before these metrics were found."""
        if self.best and trainer.is_global_zero and trainer.global_step in self.wrote and self.score in found:
            scores = {**self.scores, trainer.global_step: float(found[self.score])}
            self.scores = {step: each for step, each in scores.items() if step in self.wrote and math.isfinite(each)}
            write_json(self.folder.best, {"score": self.score, "steps": self.scores})
            self._remove_others(trainer)

    def _saved_scores(self) -> dict[int, float]:
        """The scores by step in the run's folder. Those of another metric do not count."""
        try:
            saved = json.loads(self.folder.best.read_text("utf-8"))
            found = {int(step): float(value) for step, value in saved["steps"].items()}
            return found if saved["score"] == self.score else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            warn(f"'{self.folder.best}' cannot be read ({error}); the best checkpoint is looked for from here on")
            return {}

    def _ranked(self, steps: Collection[int]) -> list[int]:
        """The steps among these that have a score, the best one first; of equal ones, the later one."""
        sign = -1 if self.score.endswith(("precision", "recall")) else 1
        return sorted(self.scores.keys() & set(steps), key=lambda step: (sign * self.scores[step], -step))

    def best_checkpoint(self) -> tuple[Path, float] | None:
        """The best one that is there, and its score. None without one, or if the best ones are not kept."""
        steps = self._ranked(self._there())
        return (self.folder.checkpoint(steps[0]), self.scores[steps[0]]) if steps else None

    def _there(self) -> list[int]:
        """The steps whose checkpoints this run wrote and that are whole."""
        return [step for step in self.wrote if self.folder.checkpoint(step).exists()]

    def _remove_others(self, trainer: Trainer) -> None:
        wrote = self.wrote if trainer.is_global_zero else []
        for step in wrote:
            if step not in (*wrote[-self.newest :], *self._ranked(wrote)[: self.best]):
                phase_strategy(trainer).background.afterwards(partial(self._remove, self.folder.checkpoint(step)))

    def _remove(self, path: Path) -> None:
        with best_effort(path, "older checkpoints", "removed"):
            remove(path)

    def state_dict(self) -> dict[str, list[int]]:
        return {"wrote": list(self.wrote)}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.wrote = list(state["wrote"])

    def refuse_if_not_saved(self, first: bool) -> None:
        """Raise if the last save has failed. The first rank says it for all."""
        if self.failed is not None:
            there = self._there()
            older = f"the newest one is {self.folder.checkpoint(there[-1])}" if there else "there is no other"
            error = UserError(f"the last checkpoint was not saved, and {older}: {self.failed}")
            error.said = not first
            raise error
