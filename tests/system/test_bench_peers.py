"""The comparison with other frameworks: its verdicts and figures, and that no peer can stop it."""

import re
import time
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gan.bench import peers
from gan.bench.device import Counter, payload
from gan.bench.peers import Peer, PeersBenchmark, distance
from gan.bench.task import Feed, Task, alternate, hand_loop, weights
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


def wrong_on_one_rank(task):
    return {name: weight + task.rank for name, weight in peers.by_hand(task).items()}


def raises(task):
    if task.rank == 1:
        raise RuntimeError("rank 1 has had enough\nand says more")
    dist.barrier()  # waits for ever


def test_without_synchronisation_it_is_wrong_and_so_if_one_rank_is():
    result = measured(deaf)
    assert result["verdict"] == "WRONG" and result["difference"] > 1e-4
    assert result["payload, kB"] == 0 and result["of by hand"] > 0
    result = measured(wrong_on_one_rank)
    assert result["verdict"] == "WRONG" and result["difference"] == pytest.approx(1)


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


def test_ranks_share_the_global_batch():
    whole, parts = task().batch(3), [task(rank=rank, ranks=2).batch(3) for rank in range(2)]
    for name, value in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)
    assert not torch.equal(whole["x"], task().batch(4)["x"])
    assert task(dtype=torch.float32).batch(3)["x"].dtype == torch.float32


def test_the_penalty_is_part_of_the_loss_and_reaches_the_weights():
    generator, discriminator = task().networks()
    batch = task().batch(0)
    with_penalty = task().judge(generator, discriminator, batch)
    without = task(penalty=False).judge(generator, discriminator, batch)
    real = batch["x"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(discriminator(real).sum(), real)
    torch.testing.assert_close(with_penalty - without, slope.square().sum(1).mean() / 2)
    with_penalty.backward()
    assert all(weight.grad is not None for weight in discriminator.parameters())
    assert all(weight.grad is None for weight in generator.parameters())


def test_the_loop_by_hand_teaches_both():
    networks, play = hand_loop(task())
    before = weights(*networks)
    play([task().batch(0)])
    assert all(not torch.equal(before[name], weight) for name, weight in weights(*networks).items())
    assert all(weight.requires_grad for weight in networks[1].parameters())


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_feed_counts_its_batches_and_times_both(alone):
    """Also for one who does not ask beyond its length."""
    for asks in (iter, lambda feed: islice(feed, len(feed))):
        feed = Feed(task(), rounds=3, steps=2)
        played = 0
        for _ in asks(feed):
            played += 1
            dist.all_reduce(torch.ones(5))
            time.sleep(0.01)
        assert played == len(feed)
        assert len(feed.peer_seconds) == len(feed.hand_seconds) == 3
        assert min(feed.peer_seconds) >= 0.02 and min(feed.hand_seconds) > 0
        assert feed.payload == 20


def test_the_larger_side_of_a_collective_counts(alone):
    big, small = torch.zeros(10), torch.zeros(10)
    with Counter(payload) as counter:
        dist.barrier()
        big + small
    assert counter.total == 0
    for collective in (
        lambda: dist.all_reduce(big),
        lambda: dist.broadcast(big, 0),
        lambda: dist.all_gather_into_tensor(big, small),
        lambda: dist.all_gather([big], small),
        lambda: dist.reduce_scatter_tensor(small, big),
    ):
        with Counter(payload) as counter:
            collective()
        assert counter.total == 40


def test_a_difference_anywhere_counts():
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    other.load_state_dict(one.state_dict())
    assert distance(weights(one, one), weights(one, other)) == 0
    with torch.no_grad():
        other.bias[1] += 0.5
    assert distance(weights(one, one), weights(one, other)) == pytest.approx(0.5)
    assert distance(weights(one, one), weights(other, one)) == pytest.approx(0.5)
    with torch.no_grad():
        other.weight[0, 0] = float("nan")
    assert not distance(weights(one, one), weights(other, one)) <= 1
