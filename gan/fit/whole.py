"""Which checkpoint a run goes on from: the newest one that is whole, of which every byte is as it was written."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Timer

from gan.checkpoint import check
from gan.errors import UserError
from gan.fit.folder import RunFolder, is_checkpoint
from gan.shard_file import Damaged

QUIET = 5.0  # seconds that a check takes without a word

Say = Callable[[str], None]


def to_resume(typed: str, folder: RunFolder, checkpoint: Path, say: Say, option: str = "--resume ") -> Path:
    """The checkpoint to go on from, for what was typed after an option and the checkpoint that it was found to mean."""
    if not is_checkpoint(Path(typed)):
        return newest_whole([checkpoint, *folder.before(checkpoint)], say, option)
    try:
        _check(checkpoint, say)
    except Damaged as error:
        raise UserError(f"{error}; {instead(folder, checkpoint, option)}") from error
    return checkpoint


def newest_whole(checkpoints: Sequence[Path], say: Say, option: str = "--resume ") -> Path:
    """The first of these that is whole. A line says which was damaged, and why. It is an error if none is whole."""
    failures: list[Damaged] = []
    for path in checkpoints:
        try:
            _check(path, say)
        except Damaged as error:
            failures.append(error)
            continue
        for failure in failures:
            say(f"{failure}; going on from {path}")
        return path
    raise UserError(f"{failures[0]}; no earlier checkpoint of the run is whole, so begin a new run: leave {option}out")


def instead(folder: RunFolder, damaged: Path, option: str = "") -> str:
    """What to type in place of a damaged checkpoint, after this option of the command."""
    for path in folder.before(damaged):
        try:
            check(path)
        except UserError:
            continue
        return f"the newest whole checkpoint before it is {path}: type {option}{path}"
    return "no earlier checkpoint of the run is whole"


def _check(path: Path, say: Say) -> None:
    timer = Timer(QUIET, say, [f"checking all of {path} ..."])
    timer.daemon = True
    timer.start()
    try:
        check(path)
    finally:
        timer.cancel()
