"""`make mutants`: puts one mistake at a time into a copy of the source, and runs the tests that must fail.

    python -m tests.mutants                     all mistakes of mistakes.txt
    python -m tests.mutants --only noise phase  those with one of the words in their name or file

Each mistake is tried in a fork of this process, which has imported torch. It ends with 1 if one lives.
"""

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutants.table import MISTAKES, mutants

ROOT = Path(__file__).parents[2]
FIGURES = ROOT.with_name("shared")  # golden ones
ROOMS = ("gan", "nets", "datasets", "strategies", "samples")
COPIED = (*ROOMS, "tests", "docs")
SAID = {0: "LIVES", 1: "dies", 2: "dies (import)", None: "dies (hangs)"}


class Mistake(NamedTuple):
    name: str
    file: str
    source: str  # of the whole file
    tests: Sequence[str]


def of_table(words: Sequence[str]) -> Iterator[Mistake]:
    if stale := stale_rows():
        raise SystemExit(f"{MISTAKES.name} does not fit the source any more; correct these mistakes:\n{stale}")
    for mutant in mutants():
        if any(word in mutant.name or word in mutant.file for word in words):
            source = (ROOT / mutant.file).read_text("utf-8")
            yield Mistake(mutant.name, mutant.file, source.replace(mutant.old, mutant.new), mutant.tests)


def stale_rows() -> str:
    """A line for each mistake whose text is not in its file once, that is no Python, or whose tests are gone."""
    lines = []
    for mutant in mutants():
        path = ROOT / mutant.file
        source = path.read_text("utf-8") if path.exists() else ""
        if (count := source.count(mutant.old)) != 1:
            every = (file for room in ROOMS for file in (ROOT / room).rglob("*.py"))
            here = [str(file.relative_to(ROOT)) for file in every if mutant.old in file.read_text("utf-8")]
            where = f"it is in {', '.join(here)}" if here else "no file has it"
            lines.append(f"'{mutant.name}': its text is {count} times in {mutant.file}; {where}")
        try:
            compile(source.replace(mutant.old, mutant.new), mutant.file, "exec")
        except SyntaxError as error:  # which every test would find
            lines.append(f"'{mutant.name}': it leaves no Python in {mutant.file}: {error}")
        for test in mutant.tests:
            file, _, name = test.partition("::")
            path = ROOT / "tests" / file
            if not path.exists() or name.partition("[")[0] not in path.read_text("utf-8"):
                lines.append(f"'{mutant.name}': there is no tests/{test}")
    return "\n".join(lines)


def write(path: Path, source: str) -> None:
    path.write_text(source, "utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(copy: Path, tests: Sequence[str], patience: float) -> int | None:
    """The status of pytest in a fork of this process; None if it has not ended in so many seconds."""
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os.chdir(copy)
        os.environ["PYTHONPATH"] = sys.path[0] = str(copy)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        out = os.open(copy / "said", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        import pytest

        os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)]))
    until = time.monotonic() + patience
    try:
        while time.monotonic() < until:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # also what the tests have left


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Try whether tests find mistakes.")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="mistakes with a word in name or file")
    parser.add_argument("--patience", type=float, default=180, help="seconds; tests that hang longer have found it too")
    typed = parser.parse_args()
    if not (mistakes := list(of_table(typed.only))):
        sys.exit(f"no mistake has one of these words in its name or file: {' '.join(typed.only)}")

    import lightning.pytorch  # noqa: F401 - once for all forks
    import pytest  # noqa: F401
    import torch  # noqa: F401

    lives, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "checkout")
        if FIGURES.exists():
            copy.with_name(FIGURES.name).symlink_to(FIGURES)
        else:
            print(f"{FIGURES} is not there, so mistakes that only its golden figures find live")
        for room in COPIED:
            shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
            shutil.copy(ROOT / name, copy)
        tests = list(dict.fromkeys(test for mistake in mistakes for test in mistake.tests))
        if run_tests(copy, tests, len(mistakes) * typed.patience):
            sys.exit(f"the tests fail without a mistake:\n{(copy / 'said').read_text('utf-8')[-3000:]}")
        print(f"{len(tests)} files of tests pass without a mistake ({time.monotonic() - began:.0f} s)", flush=True)
        for mistake in mistakes:
            start = time.monotonic()
            write(copy / mistake.file, mistake.source)
            status = run_tests(copy, mistake.tests, typed.patience)
            write(copy / mistake.file, (ROOT / mistake.file).read_text("utf-8"))
            if status in (4, 5):
                sys.exit(f"'{mistake.name}': pytest finds no test at {' '.join(mistake.tests)}, or slow ones alone")
            said = SAID.get(status, f"dies ({status})")
            lives += status == 0
            print(f"{said:13} {mistake.file:38} {mistake.name}  {time.monotonic() - start:.1f} s", flush=True)
    print(f"{len(mistakes) - lives} of {len(mistakes)} mistakes are found, in {time.monotonic() - began:.0f} s")
    return int(lives > 0)


if __name__ == "__main__":
    sys.exit(main())
