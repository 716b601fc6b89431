"""A small part of `make faults`: the same few cases each time, as long as commands have the same options."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.__main__ import kind_of
from tests.faults.kinds import KINDS

ROOT = Path(__file__).parents[2]
SEED, CASES = 213, 14


@pytest.mark.promise(
    "any of these by dice: command lines, settings, checkpoints, data, files in the way, packets to the ranks' ports",
    "status 0 or 2, one error line, no hang, nothing lost, no damaged weights taken",
)
def test_a_few_cases_of_every_kind_break_no_rule():
    assert {kind_of(SEED, number) for number in range(CASES)} == set(KINDS)
    command = [sys.executable, "-m", "tests.faults", "--seed", str(SEED), "--cases", str(CASES), "--workers", "2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{CASES} cases in" in ended.stdout
