"""`make test`: two tiers, one after the other, and their totals. `python -m pytest` runs the same in one process.

`python -m tests tests/unit tests/ranks/test_ddp.py` runs only what lies there.
"""

import multiprocessing
import os
import sys
import time
from collections import Counter, deque
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from unittest import mock

from tests.support import forked
from tests.support.worker import work

# The longest files, and those that wait long: as the last ones they would keep one process busy alone.
FIRST = (
    *("slurm", "restarts", "windows", "contract", "fit", "devices", "rehearsal", "dp", "verify", "pipeline", "fsdp"),
    *("games", "export", "evaluate", "some", "names", "hifigan", "agent"),
    *("crashes", "lost_ranks"),  # of the second tier
)
TIERS = {"together": "not slow and not alone", "alone": "alone and not slow"}
PROCESSES = 4  # each has worlds of two and of four ranks, which wait a lot
SLOWEST = 10  # tests whose time is told
ENDS = (0, 1, 5)  # of pytest: all is well, tests have failed, the last file had no test of its tier


def place(path: Path) -> int:
    name = path.stem.removeprefix("test_")
    return FIRST.index(name) if name in FIRST else len(FIRST)


def start_server() -> None:
    """Start the server from which tests, their ranks and commands are forked: importing all takes six seconds."""
    forkserver.set_forkserver_preload(["tests.support.preload"])
    own = [(number, os.dup(number)) for number in (1, 2)]
    with open(os.devnull, "w") as nothing, mock.patch.dict(os.environ, PYTHONPATH=str(Path.cwd())):
        for number, _ in own:  # what ranks print
            os.dup2(nothing.fileno(), number)
        forkserver.ensure_running()
    for number, kept in own:
        os.dup2(kept, number)
        os.close(kept)
    os.environ[forked.SERVER] = forked.named()


class Report:
    """What processes have told of their tests."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.seconds: Counter[str] = Counter()
        self.column = 0

    def hear(self, kind: str, letter: str, name: str, text: str, seconds: float) -> None:
        self.seconds[name] += seconds
        if kind:
            self.counts[kind] += 1
            self.column = self.column % 100 + 1
            print(letter, end="\n" if self.column == 100 else "", flush=True)
        if text:
            self.wrong.append("\n".join([name, *(line for line in text.splitlines() if line[:2] == "E ")][:9]))
            print(f"\n==== {name}\n{text}", flush=True)


def play(pipes: list[Connection], files: list[str], marks: str, told: Report) -> None:
    """Give each process one file after the other, until all files are done."""
    left, has = deque(files), {}

    def give(pipe: Connection) -> None:
        if left:
            has[pipe] = left.popleft()
            pipe.send((has[pipe], marks))

    for pipe in pipes:
        give(pipe)
    while has:
        for pipe in wait(list(has)):
            try:
                message = pipe.recv()
            except EOFError:
                told.hear("error", "E", has.pop(pipe), "the process that ran this file has ended", 0.0)
                continue
            if message is None:
                del has[pipe]
                give(pipe)
            else:
                told.hear(*message)
    for file in left:
        told.hear("error", "E", file, "no process is left to run this file", 0.0)


def main() -> int:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of some 300 processes compiles all our files again
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    began = time.monotonic()
    if sys.platform != "win32":
        start_server()
    context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
    told, pipes, processes, lines = Report(), [], [], []
    for _ in range(PROCESSES):
        ours, theirs = multiprocessing.Pipe()
        processes.append(context.Process(target=work, args=(theirs, dict(os.environ))))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    paths = [path for root in sys.argv[1:] or ["tests"] for path in (Path(root), *Path(root).rglob("test_*.py"))]
    paths = sorted(filter(Path.is_file, paths), key=lambda path: (place(path), path))
    for tier, marks in TIERS.items():
        print(f"==== {tier}: {marks}", flush=True)
        start, before = time.monotonic(), told.counts.copy()
        files = [str(path) for path in paths if tier != "alone" or "mark.alone" in path.read_text("utf-8")]
        play(pipes, files, marks, told)
        lines.append(f"{tier:10}{said(told.counts - before, time.monotonic() - start)}")
        print(flush=True)
    for pipe, process in zip(pipes, processes, strict=True):
        with suppress(OSError):
            pipe.send(None)
        process.join()
        if process.exitcode not in ENDS:
            told.wrong.append(f"a process of the tests has ended with status {process.exitcode}")
    slowest = [f"{seconds:6.1f} s  {name}" for name, seconds in told.seconds.most_common(SLOWEST)]
    print("==== the slowest tests", *slowest, "====", *told.wrong, *lines, sep="\n")
    print(f"{'all':10}{said(told.counts, time.monotonic() - began)}")
    return bool(told.wrong)


def said(counts: Counter[str], seconds: float) -> str:
    return f"{', '.join(f'{number} {kind}' for kind, number in counts.items())} in {seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
