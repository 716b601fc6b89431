"""What was read and found good once is not read again, as long as its files stay as they are.

A data set of 30,000 pictures takes minutes to read and a second to list. So what was done for each entry is
written down with the sizes and times of its files; a later start does it for new and changed entries only.
"""

import hashlib
import multiprocessing
import os
import signal
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from filelock import FileLock, Timeout
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from gan.errors import UserError

BESIDE = "gan-cache"  # beside the data, where that can be written to
CHOSEN = "GAN_CACHE"  # the environment's word on where to keep it instead
ENOUGH = 100  # problems after which the rest is not looked at
SHOWN = 5  # of them are named
SAVE_EVERY = 20.0  # seconds of work that a kill may cost
WAIT = 2.0  # seconds for another process before that is said
FEW = 64  # entries that are not worth starting processes for


class Found(NamedTuple):
    """A file, below the data set's root, with what tells whether it has changed."""

    path: str
    size: int
    changed: int


def walk(folder: Path) -> Iterator[os.DirEntry]:
    """All files below a folder, through links too; hidden files are no data."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                yield from walk(Path(entry.path))
            else:
                yield entry


def cache_folder(root: Path) -> Path:
    """Where what is known of a data set is kept: beside it, or in $GAN_CACHE, or in the user's own cache."""
    beside = root / BESIDE
    chosen = os.environ.get(CHOSEN)
    if not chosen and (beside.is_dir() or os.access(root, os.W_OK)):
        return beside
    where = Path(chosen or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "gan").expanduser()
    whole = root.resolve()
    return where / f"{whole.name}-{hashlib.blake2b(os.fsencode(whole), digest_size=4).hexdigest()}"


def go_through(
    file: Path,
    keys: Sequence[str],
    stamps: np.ndarray,
    work: Callable[[int], None],
    title: str,
    lost: Callable[[], np.ndarray] | None = None,
) -> list[str]:
    """Do `work` for every entry that is new, or whose stamps have changed since; gives the problems.

    An entry is its key and a row of stamps. Work that raises a UserError is a problem, and is done again the
    next time; so is work whose result is `lost`. One process at a time is at work: ranks that start together
    wait for the first, and find it done. `file` is written as the work goes on, so a kill costs seconds.
    """
    if not len(_left(file, keys, stamps, lost)):
        return []
    with _writing(file.parent), _alone(file.with_suffix(".lock")):
        for killed in file.parent.glob(f"{file.stem}.*.part"):
            killed.unlink()
        todo = _left(file, keys, stamps, lost)
        good = np.ones(len(keys), bool)
        good[todo] = False
        problems: list[str] = []
        saved = time.monotonic()
        try:
            for entry, problem in _results(work, todo, title):
                if problem is None:
                    good[entry] = True
                else:
                    problems.append(problem)
                    if len(problems) == ENOUGH:
                        break
                if time.monotonic() - saved > SAVE_EVERY:
                    _save(file, keys, stamps, good)
                    saved = time.monotonic()
        finally:
            _save(file, keys, stamps, good)
    return problems


def refuse(problems: Sequence[str], root: Path) -> None:
    """Raise what is wrong with a data set, if anything: the first few by name, and how many there are."""
    if not problems:
        return
    if len(problems) == 1:
        raise UserError(problems[0])
    count = f"{len(problems)} problems" if len(problems) < ENOUGH else f"{ENOUGH} problems (and no more looked for)"
    lines = [f"{count} in {root}:", *problems[:SHOWN]]
    if len(problems) > SHOWN:
        lines.append(f"... and {len(problems) - SHOWN} more")
    raise UserError("\n  ".join(lines))


def _left(file: Path, keys: Sequence[str], stamps: np.ndarray, lost: Callable[[], np.ndarray] | None) -> np.ndarray:
    """The entries that are not known as they are now."""
    done = np.zeros(len(keys), bool)
    try:
        with np.load(file, allow_pickle=False) as known:
            rows, old = {name: row for row, name in enumerate(known["keys"])}, known["stamps"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return np.flatnonzero(~done)
    if old.shape[1:] != stamps.shape[1:]:
        return np.flatnonzero(~done)
    place = np.array([rows.get(os.fsencode(key), -1) for key in keys], int)
    done = place >= 0
    done[done] = (old[place[done]] == stamps[done]).all(1)
    if lost is not None:
        done &= ~lost()
    return np.flatnonzero(~done)


def _save(file: Path, keys: Sequence[str], stamps: np.ndarray, good: np.ndarray) -> None:
    names = np.array([os.fsencode(keys[entry]) for entry in np.flatnonzero(good)], dtype="S")
    part = file.with_suffix(f".{os.getpid()}.part")
    with part.open("wb") as stream:
        np.savez(stream, keys=names, stamps=stamps[good])
    part.replace(file)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say what to do where a folder cannot be written to, or is full."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UserError(
            f"cannot write to {folder}: {error.strerror or error}; set the environment variable {CHOSEN} to a folder "
            "where what is known of data sets may be kept"
        ) from error


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process that holds it, however that ends."""
    lock = FileLock(file)
    try:
        lock.acquire(timeout=WAIT)
    except Timeout:
        if rank_zero_only.rank == 0:
            print(f"waiting for another process that is at work in {file.parent}", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


class _Work(Dataset):
    """What a worker process does for one entry."""

    def __init__(self, work: Callable[[int], None], todo: np.ndarray) -> None:
        self.work, self.todo = work, todo

    def __len__(self) -> int:
        return len(self.todo)

    def __getitem__(self, place: int) -> tuple[int, str | None]:
        entry = int(self.todo[place])
        try:
            self.work(entry)
        except (UserError, OSError) as error:
            return entry, str(error)
        return entry, None


def _results(work: Callable[[int], None], todo: np.ndarray, title: str) -> Iterator[tuple[int, str | None]]:
    """Every entry with its problem, as they come, with a bar where it takes longer than a moment."""
    serial = len(todo) <= FEW or multiprocessing.current_process().daemon  # a daemon has no children
    loader = DataLoader(
        _Work(work, todo),
        batch_size=16,
        collate_fn=list,
        num_workers=0 if serial else min(32, _cores()),
        worker_init_fn=_leave_ctrl_c,
        generator=torch.Generator(),  # else it would draw from the global one
    )
    terminal = sys.stderr.isatty()
    with tqdm(
        total=len(todo), desc=title, unit="picture", delay=1, dynamic_ncols=True, mininterval=0.5 if terminal else 20
    ) as bar:
        for batch in loader:
            yield from batch
            bar.update(len(batch))


def _leave_ctrl_c(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
