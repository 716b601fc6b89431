"""`make mutants`: puts one mistake at a time into a copy of the source, and runs the tests that must fail.

    python -m tests.mutants                                      all mistakes of table.py
    python -m tests.mutants --only noise phase                   those with one of the words in their name or file
    python -m tests.mutants gan/noise.py unit/gan/test_noise.py  20 simple mutations of one file, against these tests

Each mistake is tried in a fork of this process, which has imported torch. It ends with 1 if a test of table.py found
nothing. Simple mutations may live: many change nothing that counts. Compare what lives before and after tests change.
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

from tests.mutants.simple import mutations
from tests.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]
COPIED = ("gan", "nets", "datasets", "strategies", "samples", "tests")
PATIENCE = 180  # seconds; tests that hang have noticed the mistake too
SAID = {0: "LIVES", 1: "dies", None: "dies (hangs)"}


class Mistake(NamedTuple):
    name: str
    file: str
    source: str  # of the whole file
    tests: Sequence[str]


def of_table(words: Sequence[str]) -> Iterator[Mistake]:
    for mutant in MUTANTS:
        source = (ROOT / mutant.file).read_text("utf-8")
        if source.count(mutant.old) != 1:
            raise SystemExit(f"'{mutant.name}': its text is {source.count(mutant.old)} times in {mutant.file}")
        if any(word in mutant.name or word in mutant.file for word in words):
            yield Mistake(mutant.name, mutant.file, source.replace(mutant.old, mutant.new), mutant.tests.split())


def of_file(file: str, tests: Sequence[str], count: int) -> Iterator[Mistake]:
    found = list(mutations((ROOT / file).read_text("utf-8")))
    count = min(count, len(found))
    for each in (found[number * len(found) // count] for number in range(count)):
        yield Mistake(f"{each.line}: {' '.join(each.was.split())} -> {each.becomes}", file, each.source, tests)


def write(path: Path, source: str) -> None:
    path.write_text(source, "utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def run_tests(copy: Path, tests: Sequence[str]) -> int | None:
    """The status of pytest in a fork of this process; None if it has not ended in time."""
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
    until = time.monotonic() + PATIENCE
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
    parser.add_argument("--count", type=int, default=20, help="how many simple mutations of a file")
    parser.add_argument("file", nargs="?", help="a file of the source, such as gan/noise.py")
    parser.add_argument("tests", nargs="*", help="tests of the file, such as unit/gan/test_noise.py")
    typed = parser.parse_args()
    mistakes = list(of_file(typed.file, typed.tests, typed.count) if typed.file else of_table(typed.only))

    import lightning.pytorch  # noqa: F401 - once for all forks
    import pytest  # noqa: F401
    import torch  # noqa: F401

    lives, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for room in COPIED:
            shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
            shutil.copy(ROOT / name, copy)
        tests = list(dict.fromkeys(test for mistake in mistakes for test in mistake.tests))
        if run_tests(copy, tests):
            sys.exit(f"the tests fail without a mistake:\n{(copy / 'said').read_text('utf-8')[-3000:]}")
        print(f"{len(tests)} files of tests pass without a mistake ({time.monotonic() - began:.0f} s)", flush=True)
        for mistake in mistakes:
            start = time.monotonic()
            write(copy / mistake.file, mistake.source)
            status = run_tests(copy, mistake.tests)
            write(copy / mistake.file, (ROOT / mistake.file).read_text("utf-8"))
            said = SAID.get(status, f"dies ({status})")
            lives += status == 0
            print(f"{said:13} {mistake.file:38} {mistake.name}  {time.monotonic() - start:.1f} s", flush=True)
    print(f"{len(mistakes) - lives} of {len(mistakes)} mistakes are found, in {time.monotonic() - began:.0f} s")
    return int(lives > 0 and not typed.file)


if __name__ == "__main__":
    sys.exit(main())
