"""What has changed since a run was trained: said, or refused if its weights would not fit any more."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.parameter import is_lazy

from gan.checkpoint import load
from gan.errors import UserError
from gan.fit import options
from gan.fit.folder import RunFolder
from gan.runs import Run


class Resumed:
    """A run that is trained on, with the settings that it was trained with and those that it has now."""

    def __init__(self, folder: RunFolder, run: str, now: Mapping[str, Any]) -> None:
        """`run` is where the run is now, and `now` are its settings."""
        self.folder, self.now = folder, now
        saved = options.load(folder.settings, run)
        self.out, self.before = Path(saved.out), options.run_settings(saved)
        self.changed = [name for name, value in now.items() if value != self.before.get(name)]

    def __str__(self) -> str:
        """What has changed, as options; empty if nothing has."""
        if not self.changed:
            return ""
        return f"the run was trained with {self._typed(self.before)}, and goes on with {self._typed(self.now)}"

    def _typed(self, settings: Mapping[str, Any]) -> str:
        return " ".join(f"--{name.replace('_', '-')} {settings.get(name)}" for name in self.changed)

    def check(self, run: Run, checkpoint: Path) -> None:
        """Refuse networks that the checkpoint's weights do not fit."""
        saved = load(checkpoint).get("state_dict", {})
        for name, weight in run.game.state_dict(keep_vars=True).items():
            there = getattr(saved.get(name), "shape", None)
            if there is None or not isinstance(weight, Tensor) or is_lazy(weight) or there == weight.shape:
                continue
            by = f"{self}; leave out what changes them" if self.changed else "its code or its data have changed"
            raise UserError(
                f"the checkpoint's networks are of other sizes: '{name}' is {_text(there)} in {checkpoint.name} "
                f"and {_text(weight.shape)} now. {by[0].upper()}{by[1:]}"
            )

    def where_data_were(self, error: UserError) -> UserError:
        """The error of a run that could not be made, with what to type if its data are not where they were."""
        data = self.now.get("data")
        if not isinstance(data, str | Path) or data != self.before["data"] or Path(data).exists():
            return error
        advice = "if its data have moved, type --data and their folder"
        here = self.folder.path.absolute()
        if not Path(data).is_absolute() and here.parent.parts[-len(self.out.parts) :] == self.out.parts:
            start = here.parents[len(self.out.parts)]
            advice = f"'{data}' is relative to {start}, where the run was started: type --data {start / data}"
        return UserError(f"{error}; {advice}")


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a number"
