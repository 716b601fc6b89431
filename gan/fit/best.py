"""The scores of a run's checkpoints, by which the best ones are kept. They are in best.json, also after a restart."""

import json
import math
from collections.abc import Collection

from gan.files import whole_file
from gan.fit.folder import RunFolder
from gan.fit.spare import Spare, warn


class Best:
    """The scores by step; lower is better. A checkpoint's score is that of the validation after its step."""

    def __init__(self, folder: RunFolder, score: str) -> None:
        """`score` is the name of a metric. If the file has those of another one, they do not count."""
        self.folder, self.score = folder, score
        self.scores: dict[int, float] = {}
        self._spare = Spare()
        try:
            saved = json.loads(folder.best.read_text())
            if saved["score"] == score:
                self.scores = {int(step): float(value) for step, value in saved["steps"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            warn(f"'{folder.best}' cannot be read ({error}); the best checkpoint is looked for from here on")

    def note(self, step: int, value: float, steps: Collection[int]) -> None:
        """The score of a step. Only those of `steps` are remembered; one that is no number is none."""
        self.scores[step] = value
        self.scores = {step: value for step, value in self.scores.items() if step in steps and math.isfinite(value)}
        with self._spare.trying(self.folder.best), whole_file(self.folder.best) as part:
            part.write_text(json.dumps({"score": self.score, "steps": self.scores}, indent=1) + "\n")

    def forget(self, step: int) -> None:
        """The checkpoint of this step is written again."""
        self.scores.pop(step, None)

    def among(self, steps: Collection[int]) -> list[int]:
        """Those of these steps that have a score, the best one first; of equal ones, the later one."""
        return sorted(self.scores.keys() & set(steps), key=lambda step: (self.scores[step], -step))
