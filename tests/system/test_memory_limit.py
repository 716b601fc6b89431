"""A game of four times the memory that one process may have is set up, trained and saved by four processes.

The limit is that of `ulimit -v`, beside what Python and its libraries have mapped. One process needs more than four
limits for the game as it is written: about half for weights, gradients, moments and averages, half for what its batch
leaves for backward. Four ranks have a quarter of all that each, and on top of it the buckets that are gathered or
reduced, and the stacks of the threads that communicate. So a quarter would not fit into one limit, whatever the policy:
the four ranks have the option `recompute`, which keeps less for backward. One process with `recompute` would need about
three limits. The first step is not tried: on a CPU each rank would get the samples of all ranks.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.heavy import Heavy
from tests.support.parity import distance
from tests.support.saved import tensors
from tests.support.worlds import ROOT

LIMIT = 320  # MB
SHARDED = "generator=zero3+recompute,teacher=zero3+recompute,*=zero3"
NO_MEMORY = ("can't allocate memory", "MemoryError", "Cannot allocate memory", "can't start new thread")


def heavy(folder: Path, policy: str, devices: int, limit: int, *more: str) -> subprocess.CompletedProcess:
    # One arena, small stacks and no large block on the heap: then what is mapped is what is used.
    memory = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    command = [sys.executable, "-m", "tests.support.heavy", str(folder), "--policy", policy, "--devices", str(devices)]
    return subprocess.run(
        [*command, "--limit", str(limit), *more],
        cwd=ROOT,
        env={**os.environ, **memory, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_STACK, (2 * 2**20, resource.RLIM_INFINITY)),
        capture_output=True,
        text=True,
        timeout=400,
    )


def has_no_memory(ended: subprocess.CompletedProcess) -> bool:
    return ended.returncode != 0 and any(words in ended.stderr for words in NO_MEMORY)


@pytest.mark.slow
def test_four_ranks_train_what_needs_four_times_the_memory_of_one(tmp_path):
    assert has_no_memory(heavy(tmp_path, "single", 1, 4 * LIMIT))
    ended = heavy(tmp_path, SHARDED, 4, LIMIT)
    assert "trained and saved" in ended.stdout, ended.stderr[-3000:]
    assert "'generator' stays sharded after the training" in ended.stderr

    alone = tmp_path / "alone"
    alone.mkdir()
    assert "trained and saved" in heavy(alone, "single", 1, 0).stdout
    path, expected = tmp_path / "last.ckpt", tensors(alone / "last.ckpt")
    assert distance(tensors(path), expected) < 1e-4  # in float32, after two steps of Adam with 1e-4
    loaded = Heavy.load_from_checkpoint(path)
    assert torch.equal(loaded.generator[0][0].layer.weight, tensors(path)["/state_dict/generator.0.0.layer.weight"])


@pytest.mark.slow
def test_the_control_whose_constructor_makes_networks_whole_has_no_memory(tmp_path):
    assert has_no_memory(heavy(tmp_path, SHARDED, 4, LIMIT, "--real"))
