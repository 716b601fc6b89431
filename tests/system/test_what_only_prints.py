"""Commands that only print load torch, and not what takes seconds more; variables that a launcher cannot have set."""

import json
import subprocess
import sys

import pytest

SLOW = {"lightning", "torchvision", "torchmetrics", "torch._dynamo"}
PRINT = [
    *("gan.fit --help", "gan.sample --help", "gan.edit --help", "gan.evaluate --help", "gan.compare --help"),
    *("gan.export --help", "gan.verify --help", "gan.plan --help", "gan.env --help"),
    "gan.fit --list-runs",
    "gan.fit sean-folder --stratgy ddp",
    "gan.sample auto transfer --help",
    "gan.plan dmd2-faces --help",
]
GARBAGE = "gan.fit wgan-gp-faces --devices 1"
WORKS = "gan.sample nowhere"
PROGRAM = f"""
import json
import os
import sys
from importlib import import_module

for line in {[*PRINT, GARBAGE, WORKS]}:
    module, *words = line.split()
    for name in ("RANK", "LOCAL_RANK", "GAN_AGENT"):
        os.environ.pop(name, None) if line != {GARBAGE!r} else os.environ.update({{name: "first"}})
    try:
        import_module(module).main(words)
    except SystemExit:
        pass
    print("\\n" + json.dumps([line, [name for name in {sorted(SLOW | {"torch"})} if name in sys.modules]]))
"""


@pytest.fixture(scope="module")
def typed():
    """One new interpreter types them all: nothing that one has loaded goes before the next."""
    return subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)


def test_they_do_not_load_what_only_training_needs_and_the_control_one_that_works_does(typed):
    loaded = dict(json.loads(line) for line in typed.stdout.splitlines() if line.startswith('["gan.'))
    assert loaded.keys() == {*PRINT, GARBAGE, WORKS}, typed.stderr
    assert {line: found for line, found in loaded.items() if found != ["torch"] and line != WORKS} == {}
    assert set(loaded[WORKS]) >= SLOW - {"torchmetrics"}


@pytest.mark.promise("garbage in the variables of a launcher; a main port that is taken")
def test_a_rank_that_is_no_number_is_named_in_one_line(typed):
    """Lightning and torchmetrics read these when they are imported. Who has set GAN_AGENT is told too."""
    named = "error: the environment variable RANK is 'first', which is no number from 0 on"
    assert f"\n{named}\nerror: there is" in typed.stderr
