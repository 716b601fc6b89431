"""A command that ends at once leaves nothing undone."""

import subprocess
import sys
from pathlib import Path

import pytest

import gan.ending

# The file alone, for the package takes seconds to import.
ALONE = f"exec(open({str(Path(gan.ending.__file__))!r}).read())"

PROGRAM = """
import atexit, threading, time
from concurrent.futures import ThreadPoolExecutor

class Slow:
    def __del__(self):
        print("taken apart")

kept = Slow()
pool = ThreadPoolExecutor()
pool.submit(print, "pool")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
atexit.register(print, "atexit")
print("main", end=" ")
"""


def ended(closing: str) -> tuple[int, list[str]]:
    program = f"{ALONE}\n{PROGRAM}\n{closing}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.returncode, done.stdout.split()


@pytest.mark.parametrize(("closing", "more"), [("end(3)", []), ("import sys; sys.exit(3)", ["taken", "apart"])])
def test_threads_and_exit_functions_are_not_left_out(closing, more):
    status, said = ended(closing)
    assert status == 3 and sorted(said[: -1 - len(more)]) == ["main", "pool", "thread"]
    assert said[-1 - len(more) :] == ["atexit", *more]


def test_nobody_reads_any_more():
    program = f"{ALONE}\nprint('x'); os.close(1); end(2)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (2, "")
