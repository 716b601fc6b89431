"""Standard output is full, closed or no longer read: every command ends as it would have ended."""

import subprocess
import sys

import pytest

from tests.support import commands

COMMANDS = {
    "gan.export {run}": 0,
    "gan.sample {run}": 0,
    "gan.evaluate {run} --devices 2 --accelerator cpu --count 2": 0,
    "gan.plan r3gan-faces --faces 16 --size 16 --width 8 --batch-size 8 --memory 1M": 1,
    "gan.verify --help": 0,
}


def started(words, to):
    if to == ">/dev/full":
        with open("/dev/full", "w") as full:
            return commands.Typed(words.split(), stdout=full, stderr=subprocess.PIPE)
    return subprocess.Popen(["sh", "-c", f"{sys.executable} -m {words} {to}"], stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("to", [">/dev/full", ">&-"])
def test_a_command_whose_output_is_lost_ends_as_it_should(to, copy):
    processes = [started(words.format(run=copy), to) for words in COMMANDS]
    for words, process in zip(COMMANDS, processes, strict=True):
        said = process.communicate()[1]
        assert (process.returncode, "Traceback" in said, "Exception" in said) == (COMMANDS[words], False, False), said
    assert list((copy / "export").rglob("*.safetensors")) and list(copy.glob("evaluation-*.json"))
    assert list((copy / "samples").glob("reconstruct*.png"))
