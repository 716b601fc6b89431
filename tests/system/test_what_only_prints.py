"""A command that only prints loads torch, and not what takes seconds more."""

import subprocess
import sys

import pytest

SLOW = {"lightning", "torchvision", "torchmetrics", "torch._dynamo"}


def imported(*words: str) -> set[str]:
    """The modules that a new interpreter imports for this command."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", *words], capture_output=True, text=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


@pytest.mark.parametrize(
    "words",
    [
        *(["gan." + command, "--help"] for command in ("fit", "sample", "evaluate", "export", "verify", "plan", "env")),
        ["gan.fit", "--list-runs"],
        ["gan.fit", "sean-folder", "--stratgy", "ddp"],
        ["gan.sample", "auto", "transfer", "--help"],
        ["gan.plan", "dmd2-faces", "--help"],
    ],
    ids=" ".join,
)
def test_it_does_not_load_what_only_training_needs(words):
    found = imported(*words)
    assert "torch" in found and not found & SLOW


def test_the_control_what_a_command_works_with_is_seen():
    assert imported("gan.sample", "nowhere") >= SLOW - {"torchmetrics"}
