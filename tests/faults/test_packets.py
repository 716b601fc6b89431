"""A killed rank that nobody names is reported."""

import subprocess
import sys
from pathlib import Path

import pytest

UNTIED = """
from pathlib import Path
from strategies.processes.lost_ranks import Survivor
from tests.faults.case import Player
from tests.faults.kinds.packets import packets
Survivor.tie = lambda *_: None
print(Player(packets, "packets", 0, 0, Path("known").absolute()).end().wrong)
"""


@pytest.mark.slow
def test_the_control_without_a_lifeline_is_reported(tmp_path):
    command = [sys.executable, "-c", UNTIED]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, text=True)
    assert "no rank listens on a port" in ended.stdout, ended.stderr
    assert "a killed rank is named" in ended.stdout or "no traceback" in ended.stdout
