"""`make test`: two tiers, one after the other, and their totals. `python -m pytest` runs the same in one process."""

import os
import re
import subprocess
import sys
import time
from collections import Counter
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

# The files with tests of the second tier. pytest need not import the others again.
ALONE = sorted(str(path) for path in Path("tests").rglob("test_*.py") if "mark.alone" in path.read_text("utf-8"))
TIERS = {
    # Three files at a time, although each may have worlds of ranks: ranks, jobs and commands wait a lot.
    "together": ("tests", "-m", "not slow and not alone", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"),
    # They wait nearly all the time, so that one beside the other leaves each a core.
    "alone": (*ALONE, "-m", "alone and not slow", "-n", "2", "--dist", "loadfile"),
}
COUNTED = re.compile(r"(\d+) (passed|failed|errors?|skipped|xfailed|xpassed)")


def run(*arguments: str) -> tuple[int, Counter[str]]:
    """Run pytest and show what it prints; its exit code, and the counts of its closing line."""
    command = [sys.executable, "-u", "-m", "pytest", "-q", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    line = closing = ""
    while part := process.stdout.read(1):
        print(part, end="", flush=True)
        line += part
        if part == "\n":
            closing, line = line, ""
    return process.wait(), Counter({kind: int(number) for number, kind in COUNTED.findall(closing)})


def start_server() -> None:
    """Start the server from which the processes of pytest fork ranks and commands: importing all takes six seconds."""
    forkserver.set_forkserver_preload(["tests.support.preload"])
    own = [(number, os.dup(number)) for number in (1, 2)]
    with open(os.devnull, "w") as nothing, mock.patch.dict(os.environ, PYTHONPATH=str(Path.cwd())):
        for number, _ in own:  # what ranks print
            os.dup2(nothing.fileno(), number)
        forkserver.ensure_running()
    for number, kept in own:
        os.dup2(kept, number)
        os.close(kept)
    os.environ["TESTS_FORKSERVER"] = forkserver._forkserver._forkserver_address


def said(counts: Counter[str], seconds: float) -> str:
    return f"{', '.join(f'{number} {kind}' for kind, number in counts.items())} in {seconds:.0f} s"


def main() -> int:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each of some 300 processes compiles all our files again
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.platform != "win32":
        start_server()
    lines, total, codes, began = [], Counter(), [], time.monotonic()
    for name, arguments in TIERS.items():
        print(f"==== {name}: pytest {' '.join(arguments)}", flush=True)
        start = time.monotonic()
        code, counts = run(*arguments)
        codes.append(code)
        total += counts
        lines.append(f"{name:10}{said(counts, time.monotonic() - start)}")
    print("====", *lines, f"{'all':10}{said(total, time.monotonic() - began)}", sep="\n")
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    sys.exit(main())
