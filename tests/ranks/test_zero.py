"""The zero policies and their mixes: the same training as one device, and as plain torch holds it."""

import os
from contextlib import contextmanager
from functools import cache, partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning import Callback
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Adam

from gan import GanModule, Phase, Player
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.policies.fsdp import FsdpBucket
from strategies.sharding.bucket import UNSHARDED, Bucket, Sharing
from tests.ranks import test_contract as contract
from tests.support.hard_games import Plain
from tests.support.parity import EXACT, distance, often, parts, single, snapshot, trainer, vectors
from tests.support.watch import WatchedStrategy

BUCKET = 8 * 64 * 64 + 8  # bytes: the weight of a layer is in it, and its bias fills it

# ---- what a rank holds ----


HYBRID = "zero3+hybrid:2"


def weighed_in_groups():
    with mock.patch.dict(contract.PROMISES, {HYBRID: contract.PROMISES["zero3"]}):
        return contract.weighed(HYBRID, 4)


@pytest.mark.slow
def test_hybrid_shares_within_its_groups(ranks):
    """What all ranks share: test_contract.py."""
    zero3 = contract.PROMISES["zero3"]
    more = (1 + 1 / 2) / (1 + 1 / 4)  # a share is that of a group of two, and is counted as one of four
    moves = {contract.GATHER: 2 * more, contract.REDUCE: more, contract.SUM: 1 / 2}  # the sum is with the other group
    for moved, kept in ranks(4).run(weighed_in_groups):
        assert kept == pytest.approx(2 * zero3.keeps(2) + zero3.keeps_frozen(2), abs=0.05)
        for phase in ("first", "second"):
            counted = {kind: times for kind, times in moved[phase].items() if times > 0.01}
            assert counted == pytest.approx(moves, rel=0.01), phase


# ---- bucket by bucket ----


class Deep(GanModule):
    """Twenty-four layers of a bucket each, one read by another's forward, one by the loss itself, one by a method."""

    second_order = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Layers()
        self.teacher = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))

    def configure_players(self):
        yield Player("net", self.net, partial(Adam, lr=1e-3), ema=0.5, clip=0.1)
        yield Player("teacher", self.teacher)

    def configure_phases(self):
        yield Phase("net", self.loss, "net", second_order=self.second_order)

    def loss(self, batch):
        x = nn.functional.pad(batch["x"], (0, 58))
        made = self.net.second_half(self.net(x))
        decay = sum(weight.square().sum() for weight in self.net.last.parameters())
        return {"error": (made - self.teacher(x)).square().mean(), "decay": 1e-3 * decay}


class Penalised(Deep):
    """The same, gathered once a phase."""

    second_order = True


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
        self.second = nn.ModuleList(nn.Linear(64, 64) for _ in range(11))
        self.last = nn.Linear(64, 64)

    def forward(self, x):
        return torch.tanh(self.first(x)) @ self.last.weight

    def second_half(self, x):
        for layer in self.second:
            x = torch.tanh(layer(x))
        return x


class Wholes(Callback):
    """Counts how many buckets are whole at once in a step: gathered weights, and gradients on their way, whoever keeps
    them. `last`: the most in the last step."""

    def __init__(self):
        self.there, self.peak = [], 0

    def on_train_batch_start(self, *_):
        self.peak = 0

    def on_train_batch_end(self, *_):
        self.last = self.peak

    def saw(self, tensor):
        seen = StorageWeakRef(tensor.untyped_storage())
        self.there = [each for each in self.there if not each.expired() and each.cdata != seen.cdata] + [seen]
        self.peak = max(self.peak, len(self.there))

    @contextmanager
    def counting(self):
        start, joined = Bucket.start_unshard, Bucket.joined

        def starts(bucket, *args):
            start(bucket, *args)
            self.saw(bucket.whole)

        def joins(bucket, tensors):
            flat = joined(bucket, tensors)
            self.saw(flat)
            return flat

        with mock.patch.object(Bucket, "start_unshard", starts), mock.patch.object(Bucket, "joined", joins):
            yield


ORDERED = {"c10d._allgather_base_.default": "gather", "aten.addmm.default": "layer"}


def deep(policy, game, world, steps=2, size=BUCKET, batches=vectors, **settings):
    """What was trained, how many buckets were whole at once in the last step, and the gathers of each phase.

    Also the order in which each phase gathers buckets and computes layers.
    """
    module, strategy, wholes = game(), WatchedStrategy(policy, check=False), Wholes()
    seeded = mock.patch.dict(os.environ, PL_GLOBAL_SEED="11")
    with mock.patch("strategies.sharding.bucket.SIZE", size), seeded, wholes.counting():
        trainer(strategy, world, steps, callbacks=[wholes], **settings).fit(module, parts(steps, world, batches))
    traces = [trace for *_, trace in strategy.traces]
    gathers = [[size for name, size in trace.collectives if name == "_allgather_base_"] for trace in traces]
    orders = [[ORDERED[name] for name, _ in trace.operations if name in ORDERED] for trace in traces]
    return snapshot(module, strategy), wholes.last, gathers, orders


@pytest.fixture(scope="module")
def deep_alone():
    return deep("single", Deep, 1)[0]


@pytest.fixture(scope="module")
def deep_on_two(ranks):
    """`deep` on two ranks, played once for each policy."""
    return cache(lambda policy: ranks(2).run(deep, policy, Deep, 2))


@pytest.mark.parametrize("policy", often(["zero3", "zero3+offload", "zero3+whole", "net=zero3,*=ddp", "fsdp"]))
def test_what_is_read_is_there_whoever_reads_it(policy, deep_on_two, deep_alone):
    assert distance(deep_on_two(policy)[0][0], deep_alone) < EXACT


def test_a_player_is_never_whole_while_a_phase_reads_it(deep_on_two):
    """Of 24 layers that learn and 6 of a teacher, each a bucket."""
    lean, whole, zero2 = (max(peak for _, peak, *_ in deep_on_two(p)) for p in ("zero3", "zero3+whole", "zero2"))
    assert whole >= 30
    assert lean <= 4 + 4 + 3  # of each player one that is read, the last two and the next; and gradients on their way
    # Gradients do not add up either, where weights are there all the time.
    assert zero2 <= 24 + 3


def test_gathers_are_those_of_the_schedule(ranks, deep_on_two):
    """Forward gathers each bucket, and backward those that it has let go; whole, each once."""
    layer = 8 * (64 * 64 + 64)
    *_, before, lean = deep_on_two("zero3")[0][2]
    # All layers forward, the last one twice, for it is read by the network and by the loss; backward all but the first,
    # whose input needs no gradient, and two that are still there.
    assert lean == before == [layer + layer // 2] * (6 + 24 + 1 + 24 - 3)
    whole = deep_on_two("zero3+whole")[0][2][-1]
    assert whole == [layer + layer // 2] * (6 + 24)
    assert ranks(2).run(deep, "zero3", Penalised, 2)[0][2][-1] == whole


def test_the_next_bucket_is_on_its_way_while_one_is_used(deep_on_two):
    first, second = deep_on_two("zero3")[0][3]
    assert first[:6] == ["gather", "layer"] * 3
    assert second[:5] == ["gather", "gather", "layer", "gather", "layer"]


class Straddling(Deep):
    """Of some blocks one layer is in a bucket with another block's: two and a half layers fill a bucket."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList(Residual() for _ in range(6))

    def loss(self, batch):
        x = nn.functional.pad(batch["x"], (0, 58)).requires_grad_()
        for block in self.net:
            x = block(x)
        return x.square().mean()


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x):
        return x + self.last(torch.tanh(self.first(self.norm(x))))


def test_a_block_in_two_buckets_is_not_gathered_to_and_fro(ranks):
    """In backward a block's weights are read in another order than in forward."""
    policies = "zero3+whole", "zero3"
    buckets, gathers = (len(ranks(2).run(deep, each, Straddling, 2, size=2.5 * BUCKET)[0][2][-1]) for each in policies)
    assert buckets > 3
    assert gathers == 2 * buckets - 2  # for forward and for backward, which begins with the last two


class Failing(Deep):
    def loss(self, batch):
        super().loss(batch)
        raise ValueError("in the middle")


class Reads(Callback):
    """Looks at all weights when something has failed, as a callback that saves does; counts the gathers."""

    def on_exception(self, trainer, game, exception):
        with mock.patch.object(Bucket, "start_unshard") as one, mock.patch.object(FsdpBucket, "unshard") as other:
            assert game.net.last.weight.shape == (64, 64)
            list(game.parameters())
            with pytest.raises(UserError, match="is sharded"):
                game.state_dict()
        self.started = one.call_count + other.call_count


def read_after_a_failure(policy):
    reads = Reads()
    with mock.patch("strategies.sharding.bucket.SIZE", BUCKET), pytest.raises(ValueError, match="in the middle"):
        trainer(PhaseStrategy(policy, check=False), 2, 1, callbacks=[reads]).fit(Failing(), parts(1, 2))
    return reads.started


@pytest.mark.parametrize("policy", often(["zero3", "fsdp"]))
def test_after_a_failure_reading_waits_for_nobody(policy, ranks):
    assert ranks(2).run(read_after_a_failure, policy) == [0, 0]


# ---- in bfloat16 ----


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["zero2", "zero3", "zero3+whole", "fsdp", "fsdp+whole"])
def test_bf16_moves_half_the_bytes_and_trains_as_autocast_does(policy, ranks):
    mixed = {"steps": 4, "batches": single, "precision": "bf16-mixed"}
    full, _, (*_, sizes), _ = ranks(2).run(deep, policy, Deep, 2, **mixed)[0]
    half, _, (*_, halves), _ = ranks(2).run(deep, f"{policy}+bf16", Deep, 2, **mixed)[0]
    # Of each gather; piece by piece, only with bf16 backward has some.
    assert {2 * size for size in halves} == set(sizes) and halves
    assert {value.dtype for name, value in half.items() if name.endswith("exp_avg")} == {torch.float32}
    assert half.keys() == full.keys()
    assert all(value.dtype == full[name].dtype for name, value in half.items())
    # The same roundings, by autocast or by the gather; but the sum of a weight's gradients in one backward is rounded.
    assert 0 < distance(half, full) < 1e-3


def remembered_when_resharded():
    """Addresses at which a bucket is looked for that is no longer there, after it was shown in two kinds of numbers."""
    before = set(UNSHARDED)
    weights = {"weight": nn.Parameter(torch.randn(1000))}
    bucket = Bucket(weights, Sharing(2, dist.get_rank(), None, keep=False, compute_dtype=torch.bfloat16))
    bucket.unshard()
    bucket.unshard(torch.float32)
    assert len(set(UNSHARDED) - before) == 1
    bucket.reshard()
    return len(set(UNSHARDED) - before)


def test_no_bucket_is_found_where_its_memory_was(ranks):
    """Else autograd would take what lies there now for a weight."""
    assert ranks(2).run(remembered_when_resharded) == [0, 0]


# ---- weights that are read where they are not ----


class ReadsBetweenPhases(Callback):
    """Does what a callback of one's own does: it looks at a weight, and saves the state dict."""

    def __init__(self, folder):
        self.folder, self.refused, self.written = folder, [], []

    def on_train_batch_end(self, trainer, game, *_):
        rank = trainer.global_rank
        for what in (
            lambda: game.generator[0].weight.norm(),
            lambda: torch.save(game.state_dict(), self.folder / f"{rank}.pt"),
            lambda: torch.save(list(game.parameters()), self.folder / f"{rank}.pt"),
            lambda: game.generator(torch.zeros(1, 4, dtype=torch.float64)),
        ):
            try:
                what()
            except UserError as error:
                self.refused.append(str(error))
        with trainer.strategy.gathered():
            self.written.append({name: value.clone() for name, value in game.state_dict().items()})


def read_between_phases(policy, folder):
    reads, game = ReadsBetweenPhases(folder), Plain()
    trainer(PhaseStrategy(policy, check=False), 2, 1, callbacks=[reads]).fit(game, parts(1, 2))
    return reads.refused, distance(reads.written[0], game.state_dict())


@pytest.mark.promise("weights read outside of `gathered()`", "the training of one device, or a refusal by name")
@pytest.mark.parametrize(("policy", "refusals"), often([("zero3", 4), ("fsdp", 4), ("zero2", 0)]))
def test_weights_that_are_not_there_cannot_be_read_or_saved(policy, refusals, ranks, tmp_path):
    """They were not-a-numbers before, also on the disk. Inside gathered() they are the weights."""
    for said, difference in ranks(2).run(read_between_phases, policy, tmp_path):
        assert len(said) == refusals
        assert all("read weights inside `with trainer.strategy.gathered():`" in each for each in said)
        assert difference == 0


# ---- after training ----


def averages_after(policy):
    """The averaged weights of the last step, and what is there after training; or the words of a refusal."""
    found = []

    def look(*_):
        with game.averaged():
            found.append({name: weight.detach().clone() for name, weight in game.named_parameters()})

    game, ending = Plain(), LambdaCallback(on_train_end=look)
    trainer(PhaseStrategy(policy, check=False), 2, 2, sync_batchnorm=True, callbacks=[ending]).fit(game, parts(2, 2))
    try:
        look()
    except UserError as error:
        return str(error)
    return distance(*found)


def test_averages_are_read_before_training_ends_or_refused(ranks):
    assert ranks(2).run(averages_after, "ddp") == [0, 0]
    assert "training has ended; use averaged() in on_train_end" in ranks(2).run(averages_after, "zero3")[0]
