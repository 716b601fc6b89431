"""Standard output is full, closed or no longer read: every command ends as it would have ended."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "-m gan.export {run}": 0,
    "-m gan.sample {run}": 0,
    "-m gan.evaluate {run} --devices 2 --accelerator cpu --count 2": 0,
    "-m gan.plan r3gan-faces --faces 16 --size 16 --width 8 --batch-size 8 --memory 1M": 1,
    "-m gan.verify --help": 0,
    "samples/gallery.py {run}": 0,
}


@pytest.mark.parametrize("to", [">/dev/full", pytest.param(">&-", marks=pytest.mark.slow)])
def test_a_command_whose_output_is_lost_ends_as_it_should(to, sean_run, tmp_path):
    run = shutil.copytree(sean_run, tmp_path / "runs" / sean_run.name)
    started = [
        subprocess.Popen(
            ["sh", "-c", f"{sys.executable} {words.format(run=run)} {to}"], stderr=subprocess.PIPE, cwd=ROOT
        )
        for words in COMMANDS
    ]
    for words, process in zip(COMMANDS, started, strict=True):
        said = process.communicate()[1].decode()
        assert (process.returncode, "Traceback" in said, "Exception" in said) == (COMMANDS[words], False, False), said
    assert list((run / "export").rglob("*.safetensors")) and list(run.glob("evaluation-*.json"))
    assert list((run / "samples").glob("reconstruct*.png")) and (run / "gallery.html").is_file()
