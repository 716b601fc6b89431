"""A command that ends at once leaves nothing undone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gan.app.outputs
from tests.support.posix import only_on_linux

# The file alone, for the package takes seconds to import.
ALONE = f"exec(open({str(Path(gan.app.outputs.__file__))!r}).read())"

PROGRAM = """
import atexit, threading, time
from concurrent.futures import ThreadPoolExecutor

class Slow:
    def __del__(self):
        print("taken apart")

kept = Slow()
pool = ThreadPoolExecutor()
pool.submit(print, " pool ")
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


DEAF = """
import signal, time
end.__globals__["PATIENCE"] = 0.3

def died(*_):
    raise RuntimeError("a worker is killed")

signal.signal(signal.SIGCHLD, died)  # as torch does

def stay():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.set()
    time.sleep(60)

ready = multiprocessing.Event()
deaf = multiprocessing.Process(target=stay, daemon=True, name="deaf")
deaf.start()
ready.wait()
"""


@only_on_linux
def test_a_daemon_process_that_does_not_end_is_named_and_killed():
    """Such as a loader's worker, which leaves SIGTERM to the trainer and waits for a disk."""
    program = f"{ALONE}\n{DEAF}\nprint(deaf.pid)\nend(3)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, f"process {int(done.stdout)} (deaf) does not end, so it is killed\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


@only_on_linux
def test_a_process_that_is_no_daemon_is_waited_for():
    program = f"{ALONE}\n{DEAF.replace('daemon=True', 'daemon=False').replace('60', '1.5')}\nend(3)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (3, "")


@only_on_linux
def test_even_a_process_that_cannot_be_killed_holds_nothing_up():
    """It waits for a disk, inside the kernel."""
    kept = "multiprocessing.Process.kill = lambda self: None"
    program = f"{ALONE}\n{DEAF.replace('60', '30')}\n{kept}\nend(3)"
    with open(os.devnull) as nothing:  # which stays open in what is left
        done = subprocess.Popen([sys.executable, "-c", program], stdout=nothing, stderr=nothing)
        assert done.wait(20) == 3
