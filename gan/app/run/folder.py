"""The folder of a run, `runs/<number>-<name>/`: making it, finding it, and the files in it."""

import json
import os
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gan.app.run import settings_file
from gan.files.disk import lockable, read_text, waits_to_lock
from gan.files.errors import UserError, explained
from gan.files.system import quoted
from gan.runs import short_name

CHECKPOINT = ".ckpt"


class File:
    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: "RunFolder", kind: type) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The paths of a run's files. A path does not have to exist."""

    path: Path

    settings = File("settings.yaml")  # every setting of the run; `--resume` and `--config` read it
    networks = File("networks.json")  # what the file of --from or --config has said of the networks; see `of_file`
    data = File("data.json")  # the size, channels and classes of the pictures; see `instead_of_data`
    game = File("game.txt")  # players, networks and phases as text
    launch = File("launch.json")  # who trains this run now, and the last checkpoint of that; see start.py
    metrics = File("metrics.csv")  # one row for each logged step
    curves = File("curves.png")  # the metrics as a picture
    samples = File("samples")  # the reals and the grids
    best = File("best.json")  # the scores of the checkpoints that are kept; see keep.py
    scores = File("scores.json")  # the last scores of --score-every, and how they were computed
    trained = File("trained.json")  # on what it was trained, settings that have changed, names at services
    lock = File("run.lock")  # locked by the process that trains this run, see `training`
    checkpoints = File("checkpoints")

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}{CHECKPOINT}"

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order. A checkpoint that is being written has another ending."""
        return sorted(step for path in self.checkpoints.glob(f"*{CHECKPOINT}") if (step := step_of(path)) is not None)

    def newest_checkpoint(self) -> Path | None:
        """The checkpoint of the latest step, even if it was not written last.

        A user may keep a checkpoint under another form of name, such as step-000004-keep.ckpt. It is never chosen
        here; to resume from it, its path must be typed.
        """
        steps = self.steps()
        return self.checkpoint(steps[-1]) if steps else None

    def before(self, checkpoint: Path) -> list[Path]:
        """The checkpoints of earlier steps, newest first. Before a copy under another name: all."""
        last = step_of(checkpoint)
        return [self.checkpoint(step) for step in reversed(self.steps()) if last is None or step < last]

    def grids(self) -> dict[int, Path]:
        """The grids that training drew, by step, in order. A user may keep other pictures beside them."""
        found = ((re.fullmatch(r"step-(\d+)", path.stem), path) for path in self.samples.glob("step-*.png"))
        return dict(sorted((int(name[1]), path) for name, path in found if name is not None))

    def evaluations(self, step: int) -> list[Path]:
        """Where gan.evaluate saves what it has found of a step: first those of before, last the newest."""
        newest = self.path / f"evaluation-step-{step:06d}.json"
        before = self.path.glob(f"{newest.stem}-*.json")
        return [*sorted(before, key=lambda path: (len(path.name), path.name)), newest]

    def resuming(self, step: int) -> Path:
        """What to type after --resume to continue from a step: the run, or the checkpoint if there are later ones."""
        path = self.checkpoint(step)
        return path if path.exists() and path != self.newest_checkpoint() else self.path

    def fill(self, texts: Mapping[Path, str]) -> None:
        """Write the first files of a folder that nobody else knows yet. If that fails, the folder is removed."""
        try:
            for path, text in texts.items():
                path.write_text(text, encoding="utf-8")
        except OSError as error:
            self.discard()
            raise UserError(f"cannot write to '{self.path}': {error.strerror}; choose a folder with --out") from error

    def discard(self) -> None:
        """Remove the folder of a run that was refused before its first step. With metrics or checkpoints it stays."""
        if not self.metrics.exists() and not any(self.checkpoints.glob("*")):
            shutil.rmtree(self.path, ignore_errors=True)


def json_in(file: Path) -> dict[str, Any]:
    """What a file such as networks.json says; nothing if there is none."""
    kinds = OSError, ValueError, TypeError, RecursionError
    with explained(f"cannot read '{file}': {{why}}; put back what gan.fit wrote", *kinds):
        return dict(json.loads(read_text(file, 2**23))) if file.exists() else {}


def create(out: Path, name: str) -> RunFolder:
    """Make a folder with the next number. Two runs that start at the same time get two numbers."""
    with explained(f"cannot write to '{out}': {{why}}; choose a folder with --out", OSError):
        out.mkdir(parents=True, exist_ok=True)
        number = max(map(_number, out.iterdir()), default=0)
        while True:
            number += 1
            folder = RunFolder(out / f"{number:03d}-{name}")
            with suppress(FileExistsError):
                folder.path.mkdir()
                return folder


def find(which: str, out: Path, name: str | None) -> tuple[RunFolder, Path] | None:
    """The run and the checkpoint that are meant. `which` is a run's folder, a checkpoint inside it, or `auto`.

    `auto` means the newest run in `out` that has a checkpoint; with `name`, the newest one whose settings have that
    run. The result is None if there is no such run.
    """
    if which == "auto":
        paths = []
        with suppress(FileNotFoundError, NotADirectoryError):
            paths = [path for path in out.iterdir() if _number(path)]
        for run in map(RunFolder, sorted(paths, key=_number, reverse=True)):
            checkpoint = run.newest_checkpoint()
            if checkpoint is None:
                continue
            if not run.settings.is_file() and (name is None or run.path.name.endswith(f"-{short_name(name)}")):
                raise _lost(run)
            if run.settings.is_file() and name in (None, run_in(run.settings)):
                return run, checkpoint
        return None
    path = Path(which)
    absent = f"there is no '{which}'; give a run's folder such as {out}/001-sean-faces, a .ckpt in it, or auto"
    with explained(absent, FileNotFoundError, NotADirectoryError, ValueError):
        path.stat()
    folder = holding(path)
    if path.is_file():
        begins = ". A published file begins a training, and is scored at its start: python -m gan.fit RUN --from "
        begins += f"{quoted(which)} --score-every 1"
        published = path.suffix in (".pkl", ".pth", ".ckpt")
        raise UserError(
            f"'{which}' is not of a run: it is a file; give a run's folder, or auto{begins if published else ''}"
        )
    checkpoint = path if is_checkpoint(path) else folder.newest_checkpoint()
    if not folder.settings.is_file():
        if checkpoint is not None and _number(folder.path):
            raise _lost(folder)
        missing = f"'{which}' is not of a run: {folder.settings} is missing; give a run's folder, or auto"
        own = f"; a Trainer's checkpoint is loaded by MyGame.load_from_checkpoint('{which}')"
        raise UserError(missing + own * is_checkpoint(path))
    if checkpoint is None:
        raise UserError(f"'{which}' has no checkpoint; wait for its first (a dry run has none), or give another run")
    return folder, checkpoint


def _lost(folder: RunFolder) -> UserError:
    return UserError(f"'{folder.path}' has lost its settings.yaml; put it back, or name the run that you mean")


def run_in(settings: Path) -> str | None:
    return settings_file.read(settings).get("run")


def is_checkpoint(path: Path) -> bool:
    """Whether a path names a checkpoint and not a run's folder. Both are directories, so the ending decides."""
    return path.suffix == CHECKPOINT


def holding(path: Path) -> RunFolder:
    """The run's folder, from its own path or from the path of a checkpoint in it."""
    if not is_checkpoint(path):
        return RunFolder(path)
    return RunFolder((path if len(path.parts) > 1 else path.absolute()).parent.parent)


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None if the name does not have the form that a run gives."""
    match = re.fullmatch(r"step-(\d{6}|[1-9]\d{6,})", path.stem)
    return int(match[1]) if match else None


def _number(path: Path) -> int:
    match = re.match(r"(\d+)-", path.name)
    return int(match[1]) if match else 0


# ---- one process at a time ----

# The first rank locks the file `run.lock` in the run's folder while it trains, and writes into it who it is. The system
# ends the lock with the process, however that ends. Who only reads the run does not ask for it.

PATIENCE = 10.0  # seconds: a launcher may start ranks again while the first one of the attempt before is just ending


@contextmanager
def training(folder: RunFolder) -> Iterator[None]:
    """Hold the run's lock inside the `with`. Refuse, by name, if another process trains this run."""
    with ExitStack() as stack:
        advice = "resume a copy of the folder, where you may write"
        with explained(f"cannot write to '{folder.path}': {{why}}; {advice}", OSError):
            handle = stack.enter_context(lockable(folder.lock, os.O_RDWR | os.O_CREAT))
        _lock(handle, folder)
        _note(handle, f"process {os.getpid()} on {socket.gethostname()}\n")
        stack.callback(_note, handle, "")
        yield


def _lock(handle: int, folder: RunFolder) -> None:
    try:
        for times, waited in enumerate(waits_to_lock(handle)):
            os.lseek(handle, 0, os.SEEK_SET)
            who = os.read(handle, 1000).decode(errors="replace").strip() or "another process"
            if times == 0:
                print(f"{who} is training '{folder.path}'; waiting {PATIENCE:g} s for its end ...", flush=True)
            if waited > PATIENCE:
                raise UserError(f"{who} is training '{folder.path}'; end it first, or resume a copy of the folder")
    except OSError:
        alone = "so nothing keeps a second process from training this run too"
        print(f"the disk of '{folder.path}' has no locks, {alone}", flush=True)


def _note(handle: int, text: str) -> None:
    with suppress(OSError):  # the disk may be full
        os.ftruncate(handle, 0)
        os.lseek(handle, 0, os.SEEK_SET)
        os.write(handle, text.encode())
