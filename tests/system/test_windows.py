"""One device on Windows, rehearsed on Linux (tests/support/rehearsal/windows.py says what that can show)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gan import fit as fit
from tests.support import commands
from tests.support.rehearsal import session, windows
from tests.system.test_fit import final, same


def said(folder: Path, *more: str) -> str:
    """What the commands print that a person types there, one after another."""
    words = "-m", session.__name__, *more
    with (folder / "said").open("wb") as said:
        typed = commands.Typed(words, cwd=folder, env=windows.environment(), stdout=said, stderr=said)
    status = typed.wait(600)
    text = (folder / "said").read_bytes().decode("cp1252")
    assert status == 0, text
    return text


@pytest.mark.parametrize("words", [["--short"], pytest.param(["--workers", "1"], marks=pytest.mark.slow)])
def test_a_run_is_trained_stopped_resumed_sampled_scored_and_exported(words, tmp_path):
    told, run = said(tmp_path, *words), tmp_path / "runs" / "001-stops"
    assert "stopped at step 3, all saved; go on with\n" in told.replace("\r", "")
    assert fit.main([*session.TRAIN, "--out", str(tmp_path / "unbroken")]) == 0  # on this system, without a stop
    same(final(tmp_path / "unbroken" / "001-stops"), final(run))  # to the bit
    assert "error: 2 devices are trained by processes that need Linux or macOS; type --devices 1" in told
    if "--short" in words:
        return
    made = {path.name for path in (run / "export" / "step-000006").iterdir()}
    assert made == {"generator.safetensors", "discriminator.safetensors", "README.txt"}
    assert (run / "samples" / "show.png").is_file()
    assert json.loads((run / "evaluation-step-000006.json").read_text("utf-8"))["step"] == 6
    assert "Fréchet distance" in told
    assert "error: gan.bench reads memory and times from /proc, which only Linux has" in told


# ---- what the rehearsal takes away ----

TRIED = """
import mmap
import os
import sys
from pathlib import Path

def says(deed):
    try:
        return str(deed())
    except Exception as error:
        return type(error).__name__

def held(deed):
    Path("held").mkdir(exist_ok=True)
    file = Path("held/file")
    file.write_text("x")
    with file.open() as one:
        mapped = mmap.mmap(one.fileno(), 1, prot=mmap.PROT_READ)
    try:
        return says(lambda: deed(file))
    finally:
        mapped.close()

Path("Name").touch()
print(sys.platform)
print(says(lambda: exec("import fcntl")))
print(says(lambda: hasattr(os, "fork")))
print(says(lambda: hasattr(os, "sched_getaffinity")))
print(says(lambda: Path("/proc/meminfo").exists()))
print(says(lambda: os.close(os.open(".", os.O_RDONLY))))
print(says(lambda: Path("name").touch()))
print(says(lambda: Path("a:b").touch()))
print(says(lambda: Path("aux.txt").touch()))
print(held(lambda file: file.unlink()))
print(held(lambda file: file.parent.rename("other")))
print(held(lambda file: file.write_text("x\\n") and file.read_bytes()))
print(says(lambda: Path("text").write_text("\u2192")))
"""
TAKEN = (
    "win32 ModuleNotFoundError False False False PermissionError FileExistsError OSError FileNotFoundError "
    "PermissionError PermissionError b'x\\r\\n' UnicodeEncodeError"
)


def test_the_control_what_windows_lacks_is_taken_away(tmp_path):
    command = [sys.executable, "-c", TRIED]
    done = subprocess.run(command, cwd=tmp_path, env=windows.environment(), capture_output=True, text=True)
    assert done.stdout.split() == TAKEN.split(), done.stderr
