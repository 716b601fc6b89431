"""The comparison with other frameworks: its verdicts and figures, and that no peer can stop it."""

import re
import time

import pytest
import torch
import torch.distributed as dist

from gan.bench import peers
from gan.bench.peers import Peer, PeersBenchmark
from gan.bench.task import Task, alternate, weights
from strategies.policies import POLICIES

TINY = ["--width=8", "--batch-size=8", "--rounds=2", "--steps=2"]
NUMBERS = (64 * 8 + 8) + 2 * (8 * 8 + 8) + (8 * 64 + 64), (64 * 8 + 8) + 2 * (8 * 8 + 8) + (8 + 1)  # in each network


def task(**changes):
    return Task(**{**dict(penalty=True, width=8, batch_size=8, dtype=torch.float64, rank=0, ranks=1), **changes})


def measured(way, penalty=False, needs=()):
    """The figures of a peer on two ranks, or what the table says in their place."""
    benchmark = PeersBenchmark([*TINY, "--limit=60"])
    cell = "r1" if penalty else "plain", Peer("mine", way, needs)
    benchmark.cells = lambda: [cell]
    benchmark.play()
    return benchmark.why.get(cell) or benchmark.found[cell][0]


# ---- peers that only tests have ----


def deaf(task):
    """The control: the loop by hand without its synchronisation."""
    networks = task.networks()
    alternate(task, networks, networks, task.adams(*networks))
    return weights(*networks)


def raises(task):
    if task.rank == 1:
        raise RuntimeError("rank 1 has had enough\nand says more")
    dist.barrier()  # waits for ever


@pytest.mark.slow
def test_without_synchronisation_it_is_wrong():
    result = measured(deaf)
    assert result["verdict"] == "WRONG" and result["difference"] > 1e-4
    assert result["payload, kB"] == 0 and result["of by hand"] > 0


def test_a_peer_that_raises_is_told_by_its_first_line():
    began = time.monotonic()
    assert measured(raises) == "fails: RuntimeError: rank 1 has had enough"
    assert time.monotonic() - began < 45


def test_a_peer_that_is_not_installed_is_skipped():
    needs = ("torch", "not_there", "nor_this")
    assert measured(deaf, needs=needs) == "skipped: not_there and nor_this not installed"


@pytest.mark.slow
def test_it_prints_a_line_for_everyone_who_is_always_there(capsys):
    assert PeersBenchmark([*TINY, "--only", "torch", "Lightning", "ours, ddp", "--games", "r1"]).main() == 0
    said = capsys.readouterr().out
    assert "2 ranks on cpu, of one thread each, three hidden layers of 8, batch 8" in said
    lines = [re.split("  +", line) for line in said.splitlines() if line.startswith("r1  ")]
    lines = {title: rest for _, title, *rest in lines}
    gradients = f"{4 * sum(NUMBERS) / 1000:.1f}"
    for title in ("torch, by hand", "torch, DDP", "ours, ddp"):
        verdict, difference, rate, ratio, moved = lines[title]
        assert verdict == "exact" and float(difference) < 1e-10
        assert float(rate) > 0 and float(ratio) > 0 and moved == gradients
    assert lines["torch, FSDP2 kept gathered"][0] == "exact"
    assert re.search(r"^\(\d\) fails: RuntimeError: It looks like your LightningModule has param", said, re.MULTILINE)
    assert lines["Lightning ddp"][0].startswith("see (")
    # It reduces both networks in both turns.
    verdict, *_, moved = lines["Lightning ddp_find_unused_parameters_true"]
    assert verdict == "exact" and float(moved) > 1.9 * float(gradients)


# ---- the parts ----


def test_everyone_is_named_once_and_so_is_every_policy_of_ours():
    titles = [peer.title for peer in peers.peers()]
    assert len(set(titles)) == len(titles) and max(map(len, titles)) < 44
    several = [f"ours, {name}" for name, policy in POLICIES.items() if policy.max_ranks != 1 and name != "dp"]
    assert [title for title in titles if title.startswith("ours")] == several
    for word in ("Lightning ddp_find", "Accelerate, DDP", "two Accelerators", "DeepSpeed 3", "FSDP2"):
        assert any(word in title for title in titles)
