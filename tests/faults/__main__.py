"""`make faults`: play thousands of cases, and say what was wrong. `python -m tests.faults --help` lists the options."""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import torch

from tests.faults import known
from tests.faults.case import Player, Result, dice
from tests.faults.kinds import KINDS

SEED = "FAULTS_SEED"  # the environment variable in place of --seed


def main(argv: Sequence[str] | None = None) -> int:
    """Play the cases. Returns the exit status: 0 if nothing was wrong in any, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(10**6))
    add("--seed", type=int, default=seed, help=f"the same cases again; or {SEED}; default: another one each time")
    add("--cases", type=int, default=2000, help="how many cases; default 2000")
    add("--kind", choices=KINDS, help="only cases of this kind")
    add("--case", type=int, help="only the case of this number")
    add("--workers", type=int, default=os.cpu_count() or 1, help="cases at a time; default: one for each core")
    typed = parser.parse_args(argv)
    numbers = range(typed.cases) if typed.case is None else [typed.case]
    began = time.monotonic()
    print(f"{len(numbers)} cases, --seed {typed.seed}", flush=True)
    results = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # after what is to be removed
    with known_runs() as folder:
        for result in play(folder, typed.seed, numbers, typed.kind, typed.workers):
            results.append(result)
            if result.wrong or typed.case is not None:
                print(*told(result, typed.seed), sep="\n", flush=True)
            if len(results) % 100 == 0:
                print(f"{len(results)} cases, {sum(bool(each.wrong) for each in results)} failed", flush=True)
    print(*table(results), f"{len(results)} cases in {time.monotonic() - began:.0f} s", sep="\n", flush=True)
    return int(any(result.wrong for result in results))


@contextmanager
def known_runs() -> Iterator[Path]:
    """A folder with the known runs, for as long as the `with` lasts."""
    torch.set_num_threads(1)
    place = Path(tempfile.mkdtemp(prefix="gan-faults-"))
    try:
        known.made_apart(place / "known")
        yield place / "known"
    finally:
        shutil.rmtree(place, ignore_errors=True)


def kind_of(seed: int, number: int) -> str:
    """The kind of a case, by the seed and its number alone."""
    return dice(seed, number).choices(list(KINDS), [share for _, share in KINDS.values()])[0]


def play(folder: Path, seed: int, numbers: Sequence[int], kind: str | None, workers: int) -> Iterator[Result]:
    """Play cases, some at a time; their results as they come."""
    waiting, players = iter(numbers), []
    try:
        while True:
            while len(players) < workers and (number := next(waiting, None)) is not None:
                name = kind or kind_of(seed, number)
                players.append(Player(KINDS[name][0], name, seed, number, folder))
            if not players:
                return
            ready = wait([player.pipe for player in players])
            for player in [player for player in players if player.pipe in ready]:
                players.remove(player)
                yield player.end()
    finally:
        for player in players:
            player.stop()


def told(result: Result, seed: int) -> list[str]:
    """A case to read: its number, its kind, how to play it alone, what it did and what was wrong."""
    head = "FAILED" if result.wrong else "passed"
    again = f"make faults ARGS='--seed {seed} --kind {result.kind} --case {result.number}'"
    lines = [f"{head} case {result.number}, {result.kind}, {result.seconds:.1f} s; again: {again}"]
    lines += [f"    {line}" for line in result.story]
    return [*lines, *(f"  ! {line}" for line in result.wrong)]


def table(results: Sequence[Result]) -> list[str]:
    """A row for each kind: its cases and its failures."""
    rows = []
    for kind in KINDS:
        if found := [result for result in results if result.kind == kind]:
            rows.append(
                (kind, len(found), sum(bool(each.wrong) for each in found), sum(each.seconds for each in found))
            )
    rows.append(("all", *(sum(column) for column in [*zip(*rows, strict=True)][1:])))
    lines = [f"{kind:14}{cases:8}{failures:10}{seconds:9.0f}" for kind, cases, failures, seconds in rows]
    return [f"{'kind':14}{'cases':>8}{'failures':>10}{'seconds':>9}", *lines]


if __name__ == "__main__":
    sys.exit(main())
