"""The folder of one run: `runs/<number>-<name>/`, and finding it again."""

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gan.errors import UserError

CHECKPOINT = ".ckpt"


@dataclass(frozen=True)
class RunFolder:
    """Where the files of a run lie. Nothing is made until it is needed."""

    path: Path

    @property
    def settings(self) -> Path:
        """Every setting of the run, to read and to resume from."""
        return self.path / "settings.yaml"

    @property
    def game(self) -> Path:
        """Players, networks and phases in words."""
        return self.path / "game.txt"

    @property
    def metrics(self) -> Path:
        """A row a logged step."""
        return self.path / "metrics.csv"

    @property
    def curves(self) -> Path:
        """The metrics as a picture."""
        return self.path / "curves.png"

    @property
    def samples(self) -> Path:
        """Reals and the periodic grids."""
        return self.path / "samples"

    @property
    def checkpoints(self) -> Path:
        """What the run resumes from."""
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """The checkpoint of a step."""
        return self.checkpoints / f"step-{step:06d}{CHECKPOINT}"

    def steps(self) -> list[int]:
        """The steps that there are checkpoints of, in order; one that is still being written has another ending."""
        return sorted(step for path in self.checkpoints.glob(f"*{CHECKPOINT}") if (step := step_of(path)) is not None)

    def newest_checkpoint(self) -> Path | None:
        """The checkpoint of the latest step, whenever it was written.

        One that a person has given a name of another form, such as step-000004-keep.ckpt, is theirs: it is resumed
        where its path is typed, and never chosen here.
        """
        steps = self.steps()
        return self.checkpoint(steps[-1]) if steps else None

    def resuming(self, step: int) -> Path:
        """What to resume to go on from that step: the run, or the step's checkpoint where there is a later one."""
        path = self.checkpoint(step)
        return path if path.exists() and path != self.newest_checkpoint() else self.path

    def discard(self) -> None:
        """Remove what a run that was refused before its first step has left; anything else stays."""
        if not self.metrics.exists() and not any(self.checkpoints.glob("*")):
            shutil.rmtree(self.path, ignore_errors=True)


def create(out: Path, name: str) -> RunFolder:
    """A new folder with the next number; two runs that start together get two numbers."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        number = max((_number(path) for path in out.iterdir()), default=0)
        while True:
            number += 1
            folder = RunFolder(out / f"{number:03d}-{name}")
            try:
                folder.path.mkdir()
            except FileExistsError:
                continue
            folder.samples.mkdir()
            return folder
    except OSError as error:
        raise UserError(f"cannot write to '{out}': {error.strerror}; choose a folder with --out") from error


def write(texts: Mapping[Path, str]) -> None:
    """Write files, each there whole or not at all: a run that goes on writes them anew, while others may read them."""
    for path, text in texts.items():
        part = path.with_suffix(".part")
        part.write_text(text)
        part.replace(path)


def find(resume: str, out: Path, name: str | None) -> tuple[RunFolder, Path] | None:
    """The run and the checkpoint to go on with: a run's folder, a checkpoint inside it, or `auto`.

    `auto` is the newest run below `out` (of that name, if one is given) that has a checkpoint; None if no
    run has one.
    """
    if resume == "auto":
        runs = [RunFolder(path) for path in out.iterdir() if _number(path)] if out.is_dir() else []
        runs = [run for run in runs if name is None or run.path.name.split("-", 1)[1] == name]
        runs = [run for run in runs if run.newest_checkpoint() is not None and run.settings.is_file()]
        if not runs:
            return None
        run = max(runs, key=lambda run: _number(run.path))
        return run, run.newest_checkpoint()
    path = Path(resume)
    folder = holding(path)
    checkpoint = path if is_checkpoint(path) else folder.newest_checkpoint()
    if not folder.settings.is_file() or checkpoint is None or not checkpoint.exists():
        raise UserError(
            f"nothing to resume at '{resume}': expected a run's folder with checkpoints/ and settings.yaml, "
            f"or a .ckpt inside one; or type --resume auto"
        )
    return folder, checkpoint


def is_checkpoint(path: Path) -> bool:
    """Whether a path names a checkpoint rather than a run's folder: both are directories."""
    return path.suffix == CHECKPOINT


def holding(path: Path) -> RunFolder:
    """The run's folder that a path names, itself or by a checkpoint inside."""
    if not is_checkpoint(path):
        return RunFolder(path)
    return RunFolder((path if len(path.parts) > 1 else path.absolute()).parent.parent)


def step_of(path: Path) -> int | None:
    """The step in the name that a run gives its checkpoints; None for any other name."""
    match = re.fullmatch(r"step-(\d{6}|[1-9]\d{6,})", path.stem)
    return int(match[1]) if match else None


def _number(path: Path) -> int:
    match = re.match(r"(\d+)-", path.name)
    return int(match[1]) if match else 0
