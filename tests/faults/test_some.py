"""A small part of `make faults`: the same few cases each time."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEED, CASES = 3, 20


def test_a_few_cases_of_every_kind_break_no_rule():
    command = [sys.executable, "-m", "tests.faults", "--seed", str(SEED), "--cases", str(CASES), "--workers", "2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{CASES} cases in" in ended.stdout
