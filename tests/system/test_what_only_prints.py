"""Commands that only print load torch, and not what takes seconds more; variables that a launcher cannot have set."""

import json

import pytest

from tests.support import commands

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

SLOW, wanted = {SLOW}, set()
for name in [name for name in sys.modules if SLOW & {{name, name.partition(".")[0], name[:13]}}]:
    del sys.modules[name]
del sys.modules["torch"]._dynamo  # which torch imports when it is asked for

class Finder:
    def find_spec(name, *_):
        if name in SLOW:
            wanted.add(name)
            raise ImportError(name)

sys.meta_path.insert(0, Finder)
for line in {[*PRINT, GARBAGE, WORKS]}:
    module, *words = line.split()
    for name in ("RANK", "LOCAL_RANK", "GAN_AGENT"):
        os.environ.pop(name, None) if line != {GARBAGE!r} else os.environ.update({{name: "first"}})
    try:
        import_module(module).main(words)
    except (SystemExit, ImportError):
        pass
    print("\\n" + json.dumps([line, sorted(wanted)]))
    wanted.clear()
"""


@pytest.fixture(scope="module")
def typed():
    """A process types them all that has nothing of what is slow, and notes who wants to import it."""
    return commands.run("-c", PROGRAM)


def test_they_do_not_load_what_only_training_needs_and_the_control_one_that_works_does(typed):
    loaded = dict(json.loads(line) for line in typed.stdout.splitlines() if line.startswith('["gan.'))
    assert loaded.keys() == {*PRINT, GARBAGE, WORKS}, typed.stderr
    assert {line: found for line, found in loaded.items() if found and line != WORKS} == {}
    assert loaded[WORKS]


@pytest.mark.promise("garbage in the variables of a launcher; a main port that is taken")
def test_a_rank_that_is_no_number_is_named_in_one_line(typed):
    """Lightning and torchmetrics read these when they are imported. Who has set GAN_AGENT is told too."""
    named = "error: the environment variable RANK is 'first', which is no number from 0 on"
    assert typed.stderr.endswith(f"\n{named}\n")
