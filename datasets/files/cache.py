"""Remembers which files were checked, so that a file is read again only after it has changed.

Reading a data set of 30,000 pictures takes minutes; listing it takes a second. So for every entry that is done we
note the sizes and times of its files. A later start works on new and changed entries only.

The notes are lines: a checksum and JSON. Where a process was killed the last line is damaged, and the next start does
that entry again. Of two lines of an entry the later one counts.
"""

import hashlib
import json
import math
import multiprocessing
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from datasets.workers import Loader, workers_explained
from gan.files.disk import lockable, regular, waits_to_lock
from gan.files.errors import UserError, explained, printable, progress, this_rank
from gan.files.system import cores

FOLDER = "gan-cache"  # pictures.gan-cache/ is beside pictures/, where we may write there
VARIABLE = "GAN_CACHE"  # the environment variable with another folder for the cache
MAX_PROBLEMS = 100  # of pairs: we stop at this many
SHOWN_PROBLEMS = 5
NOTE_EVERY = 2.0  # seconds of work that are lost if the process is killed; each note waits for the disk
SILENT_WAIT = 2.0  # seconds to wait for another process before we print that we wait
FEW = 64  # entries that one process does alone
Texts = list[str | None]  # of entries


class FoundFile(NamedTuple):
    """A file, and what shows whether it has changed. The path starts at the data set's root."""

    path: str
    size: int
    changed: int


def all_files(folder: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[os.DirEntry]:
    """All files in a folder and below, also through links. Hidden files and caches are left out.

    `above` are device and number of the folders that it is in. A link to one of them would never end.
    """
    state = os.stat(folder)
    this = state.st_dev, state.st_ino
    if this in above:
        raise UserError(f"{folder} links to a folder that it is in; remove the link")
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or entry.name.rpartition(".")[2] == FOLDER:
                continue
            if _is_folder(entry):
                yield from all_files(Path(entry.path), (*above, this))
            else:
                yield entry


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself; who reads it says so
        return False


def cache_folder(root: Path) -> Path:
    """The cache of a data set: in $GAN_CACHE, else beside its folder or file, else in the user's own cache."""
    whole, chosen = root.resolve(), os.environ.get(VARIABLE)
    beside = whole.parent / f"{whole.name}.{FOLDER}"  # not inside: other programs take each folder there for a class
    if not chosen and (beside.is_dir() or os.access(whole.parent, os.W_OK)):
        return beside
    where = Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "gan").expanduser()
    return where / f"{whole.name}-{hashlib.blake2b(os.fsencode(whole), digest_size=4).hexdigest()}"


def remember(
    file: Path,
    keys: np.ndarray,
    stamps: np.ndarray,
    work: Callable[[int], Any],
    title: str,
    *,
    begin: Callable[[np.ndarray], None] = lambda todo: None,
    good: Callable[[str], bool] = lambda text: True,
    saving: Callable[[], None] = lambda: None,
    most: float = math.inf,
) -> tuple[Texts, list[str]]:
    """A short text for each entry, made once and noted in `file` while the entry's stamps stay; and the problems.

    An entry is a key, of bytes, and a row of stamps: the sizes and times of its files. `begin` is told which entries
    are to be done, and `work` makes the text of one, perhaps in another process. Where `work` raises a UserError, that
    is a problem: the entry has no text, and is tried again at the next start; so is one whose text is not `good`. An
    OSError that `work` returns ends it all. After the `most` problems no more is looked for.

    Notes are written while the work goes on, so a kill costs seconds; `saving` is called before. One process works at a
    time. Ranks that start together wait for the first one, and then find the work done.
    """
    entries = [(os.fsdecode(key), stamp) for key, stamp in zip(keys.tolist(), stamps.tolist(), strict=True)]
    (texts, _), problems = _texts(file, entries, good), []
    if None not in texts:
        return texts, []
    with explained_write_errors(file.parent), _one_process_at_a_time(file.with_suffix(".lock")):
        for unfinished in file.parent.glob(f"{file.stem}.*.part"):  # files that killed work has begun
            unfinished.unlink()
        texts, lost = _texts(file, entries, good)
        todo = np.array([entry for entry, text in enumerate(texts) if text is None], int)
        with suppress(FileNotFoundError):
            if lost or not file.is_file():  # else the note of a lost text could become true for other work
                file.unlink()
        begin(todo)
        lines, written = [b"\n"], time.monotonic()  # after what a killed process has begun
        lines += [_line(entries[entry], text) for entry, text in enumerate(texts) if lost and text is not None]
        with file.open("ab") as notes, ExitStack() as at_last:
            at_last.callback(_write, lines, notes, saving)
            for results in _results(work, todo, title):
                for entry, problem, made in results:
                    if problem is not None:
                        problems += [problem] if len(problems) < most else []
                        continue
                    if isinstance(made, OSError):
                        raise made
                    texts[entry] = made
                    lines.append(_line(entries[entry], made))
                if time.monotonic() - written >= NOTE_EVERY:
                    _write(lines, notes, saving)
                    written = time.monotonic()
                if len(problems) >= most:
                    break
    return texts, problems


def raise_problems(problems: Sequence[str], root: Path) -> None:
    if not problems:
        return
    if len(problems) == 1:
        raise UserError(problems[0])
    more = "" if len(problems) < MAX_PROBLEMS else " (and no more looked for)"
    found, advice = [each.partition("; ")[0] for each in problems], {each.partition("; ")[2] for each in problems}
    if len(advice) > 1 or not all(advice):
        raise UserError(listed(f"{len(problems)} problems{more} in {root}:", problems))
    raise UserError(listed(f"{len(problems)} problems{more} in {root}:", found) + f"\n{advice.pop()}")


def listed(title: str, problems: Sequence[str]) -> str:
    """A title, and below it the first few problems and how many more there are."""
    more = len(problems) - SHOWN_PROBLEMS
    return "\n  ".join([title, *problems[:SHOWN_PROBLEMS], *([f"... and {more} more"] if more > 0 else [])])


def _texts(file: Path, entries: Sequence[tuple[str, list[int]]], good: Callable[[str], bool]) -> tuple[Texts, bool]:
    """What is known of each entry; and whether anything that is known is lost."""
    known: dict[str, tuple[list[int], str]] = {}
    with suppress(OSError):
        regular(file)
        for line in file.read_bytes().splitlines():
            if line and line == _signed(line[9:]):
                key, *state = json.loads(line[9:])
                known[key] = tuple(state)
    there = {key: state for key, state in known.items() if good(state[1])}
    found = [(stamp, *there.get(key, ([], ""))) for key, stamp in entries]
    return [text if stamp == then else None for stamp, then, text in found], len(there) < len(known)


def _line(entry: tuple[str, list[int]], text: str) -> bytes:
    return _signed(json.dumps([*entry, text]).encode()) + b"\n"


def _write(lines: list[bytes], notes: BinaryIO, saving: Callable[[], None]) -> None:
    saving()
    notes.writelines(lines)
    notes.flush()
    lines.clear()


def _signed(line: bytes) -> bytes:
    return b"%08x " % zlib.crc32(line) + line


@contextmanager
def explained_write_errors(folder: Path) -> Iterator[None]:
    """Make a folder, and say what to do where it cannot be written to or is full."""
    advice = f"set the environment variable {VARIABLE} to a folder where what is known of data sets may be kept"
    with explained(f"cannot write to {folder}: {{why}}; {advice}", OSError):
        folder.mkdir(parents=True, exist_ok=True)
        yield


@contextmanager
def _one_process_at_a_time(file: Path) -> Iterator[None]:
    """Hold a lock. It is free again when its process ends, even by a kill."""
    said = this_rank() > 0
    with lockable(file, os.O_RDWR | os.O_CREAT) as handle:
        for waited in waits_to_lock(handle):
            if waited > SILENT_WAIT and not said:
                said = True
                who = "another process, perhaps one of this run"
                print(
                    printable(f"waiting for {who}, that reads the data into {file.parent}"), file=sys.stderr, flush=True
                )
        yield


Result = tuple[int, str | None, Any]  # an entry, and what is wrong with it or else what was made of it


def _worked(work: Callable[[int], Any], entries: list[int]) -> list[Result]:
    """A Loader's collate function, which its worker processes call."""
    results: list[Result] = []
    for entry in entries:
        try:
            results.append((entry, None, work(entry)))
        except (UserError, OSError) as error:
            results.append((entry, str(error), None))
    return results


def _results(work: Callable[[int], Any], todo: np.ndarray, title: str) -> Iterator[list[Result]]:
    """The results of the entries, in order, some at a time, with a progress bar after a second."""
    alone = len(todo) <= FEW or multiprocessing.current_process().daemon  # a daemon may not start processes
    workers = 0 if alone else min(32, cores())
    loader = Loader(todo.tolist(), batch_size=16, collate_fn=partial(_worked, work), seed=0, workers=workers)
    with progress(total=len(todo), desc=printable(title), unit="file") as bar, workers_explained():
        with torch.device("cpu"):  # a loader reads the value of a seed, also where a plan makes everything on meta
            batches = iter(loader)
        for batch in batches:
            yield batch
            bar.update(len(batch))
