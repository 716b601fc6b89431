"""Commands that only print load torch, and not what takes seconds more."""

import json
import subprocess
import sys

SLOW = {"lightning", "torchvision", "torchmetrics", "torch._dynamo"}
PRINT = [
    *(
        f"gan.{name} --help"
        for name in ("fit", "sample", "edit", "evaluate", "compare", "export", "verify", "plan", "env")
    ),
    "gan.fit --list-runs",
    "gan.fit sean-folder --stratgy ddp",
    "gan.sample auto transfer --help",
    "gan.plan dmd2-faces --help",
]
WORKS = "gan.sample nowhere"
PROGRAM = f"""
import json
import sys
from importlib import import_module

for line in {[*PRINT, WORKS]}:
    module, *words = line.split()
    try:
        import_module(module).main(words)
    except SystemExit:
        pass
    print("\\n" + json.dumps([line, [name for name in {sorted(SLOW | {"torch"})} if name in sys.modules]]))
"""


def test_they_do_not_load_what_only_training_needs_and_the_control_one_that_works_does():
    """One new interpreter types them all: nothing that one has loaded goes before the next."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    loaded = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["gan.'))
    assert loaded.keys() == {*PRINT, WORKS}, done.stderr
    assert {line: found for line, found in loaded.items() if found != ["torch"] and line != WORKS} == {}
    assert set(loaded[WORKS]) >= SLOW - {"torchmetrics"}
