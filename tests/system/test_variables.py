"""Variables that a launcher cannot have set, as a command meets them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.promise("garbage in the variables of a launcher; a main port that is taken")
def test_a_rank_that_is_no_number_is_named_in_one_line(tmp_path):
    """Lightning and torchmetrics read these when they are imported. Who has set GAN_AGENT is told too."""
    variables = {"RANK": "first", "LOCAL_RANK": "first", "GAN_AGENT": "x", "PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-m", "gan.fit", "wgan-gp-faces", "--devices", "1")
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, text=True)
    said = "error: the environment variable RANK is 'first', which is no number from 0 on\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)
