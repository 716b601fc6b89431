"""What has changed since a run was trained, and which checkpoint it goes on from."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.nn import Module

from gan.app.run import options, settings_file
from gan.app.run.folder import RunFolder, is_checkpoint
from gan.files.checkpoint import check, load
from gan.files.errors import Damaged, UserError
from gan.files.system import quoted, unless_within

# Settings by which a game makes its networks.
SHAPES = ("network", "judge", "norm", "dropout", "judge_width", "width", "layers", "blocks", "hidden", "style")
SHAPES += ("upsamplings", "latent", "shared", "attention", "codes", "actnorm")
QUIET = 5.0  # seconds that a check takes without a word

Say = Callable[[str], None]


def to_resume(
    typed: str, folder: RunFolder, checkpoint: Path, say: Say, option: str = "--resume ", whole: bool = True
) -> Path:
    """The checkpoint to go on from, for what was typed after an option and the checkpoint that it was found to mean.

    Without `whole`, the values of its tensors are not read.
    """
    if not is_checkpoint(Path(typed)):
        newest = folder.newest_checkpoint() or checkpoint  # a training may have saved another one since
        return newest_whole([newest, *folder.before(newest)], say, option, whole)
    try:
        _check(checkpoint, say, whole)
    except Damaged as error:
        raise UserError(f"{error}; {what_to_type(folder, checkpoint, option)}") from error
    return checkpoint


def newest_whole(checkpoints: Sequence[Path], say: Say, option: str = "--resume ", whole: bool = True) -> Path:
    """The first of these that is whole. A line says which was damaged, and why. It is an error if none is whole."""
    failures: list[Damaged] = []
    for path in checkpoints:
        try:
            _check(path, say, whole)
        except Damaged as error:
            failures.append(error)
            continue
        for failure in failures:
            say(f"{failure}; going on from {path}")
        return path
    raise UserError(f"{failures[0]}; no earlier checkpoint of the run is whole, so begin a new run: leave {option}out")


def what_to_type(folder: RunFolder, unusable: Path, option: str = "") -> str:
    """What to type in place of a checkpoint that cannot be used, after this option of the command."""
    for path in folder.before(unusable):
        with suppress(UserError):
            check(path)
            return f"the newest whole checkpoint before it is {path}: type {option}{quoted(path)}"
    return "no earlier checkpoint of the run is whole"


def _check(path: Path, say: Say, whole: bool) -> None:
    with unless_within(QUIET, say, f"checking all of {path} ..."):
        (check if whole else load)(path)


class Resumed:
    """A run that is trained on, with the settings that it was trained with and those that it has now."""

    def __init__(self, folder: RunFolder, run: str, now: Mapping[str, Any]) -> None:
        """`run` is where the run is now, and `now` are its settings."""
        self.folder, self.now, self.own = folder, now, ":" in run
        saved = options.load(folder.settings, run)
        self.before = {**options.run_settings(saved), "precision": saved.precision}
        both = ((name, value, self.before.get(name)) for name, value in now.items())
        written = settings_file.written  # the path of one folder may be typed from here or from the root
        self.changed = [name for name, value, before in both if written(name, value) != written(name, before)]

    def __str__(self) -> str:
        was, now = self._typed(self.before, self.changed), self._typed(self.now, self.changed)
        return f"the run was trained with {was}, and goes on with {now}" if self.changed else ""

    @staticmethod
    def _typed(settings: Mapping[str, Any], names: Sequence[str]) -> str:
        named = [(name.rstrip("_").replace("_", "-"), settings.get(name)) for name in names]
        return ", ".join(f"no --{name}" if value is None else f"--{name} {value}" for name, value in named)

    def as_it_was(self, chosen: str) -> str:
        """The settings that have changed, as they were; of those not typed what `chosen` says, as `Run.words` do."""
        words = dict(each.split(" ", 1) for each in chosen.split(", ") if each)
        was = {name.rstrip("_").replace("_", "-"): self.before.get(name) for name in self.changed}
        was = {name: words.get(name) if value is None else Path(str(value)).name for name, value in was.items()}
        return ", ".join(f"no {name}" if value is None else f"{name} {value}" for name, value in was.items())

    def check(self) -> None:
        """Refuse another seed, which would change nothing, and another batch, which the loader would refuse later."""
        for name in {"seed", "batch_size"}.intersection(self.changed):
            was, now = self.before[name], self.now[name]
            if name == "seed" or (isinstance(was, int) and not self.own):  # an own run may mean something else by it
                what = f"{name.replace('_', ' ')} {was}, and has {now} now"
                raise UserError(f"the run was trained with {what}; resume with {was}, or begin a new run")

    def check_networks(self, game: Module, checkpoint: Path) -> None:
        """Refuse settings that give weights of other sizes, before anything is said of training."""
        here = {name: tuple(weight.shape) for name, weight in game.named_parameters()}
        shapes = [name for name in self.changed if name in (*SHAPES, "size", "mapping", "config_")] or self.changed
        for name, weight in load(checkpoint)["state_dict"].items():  # which has not all: a VGG, say, is not saved
            if name in here and here[name] != (there := tuple(weight.shape)):
                raise UserError(
                    f"the checkpoint's networks are not this run's: '{name}' has the size {here[name]}, and there "
                    f"{there}; resume with {self._typed(self.before, shapes)}, or begin a new run"
                )


def where_data_are(error: UserError, settings: Mapping[str, Any]) -> UserError:
    """The error of a run that could not be made, with what to type if its data are gone and the error does not say."""
    data = settings.get("data")
    if not isinstance(data, str | Path) or Path(data).exists() or "--data" in str(error):
        return error
    return UserError(f"{error}; if its data have moved, type --data and their folder")
