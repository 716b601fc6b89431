"""The first step is tried together and alone. What differs is named, and nothing else is."""

import os
import random
import re
import warnings
from collections import deque
from dataclasses import replace
from functools import cache, partial
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.optim import Adam
from torch.utils.data import TensorDataset

from datasets import GlobalLoader
from gan import GanModule, Phase, Player, noise
from gan import ranks as all_ranks
from gan.pool import ImagePool
from strategies import PhaseStrategy
from strategies.check import comparison, one_device, trial
from strategies.check.trial import Trial
from strategies.observers import Casts
from strategies.world import World
from tests.support.hard_games import HARD, Plain
from tests.support.parity import (
    EXACT,
    distance,
    equals,
    often,
    parts,
    refused,
    single,
    snapshot,
    train,
    trainer,
    vectors,
)


class One(GanModule):
    """A game of one network."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def configure_players(self):
        yield Player("net", self.net, partial(Adam, lr=1e-2))

    def configure_phases(self):
        yield Phase("play", self.play, "net")


# ---- what differs ----


class RootOfMean(One):
    def play(self, batch):
        return {"root": self.net(batch["x"]).square().mean().sqrt()}


class Sum(One):
    def play(self, batch):
        return self.net(batch["x"]).square().sum()


class Contrast(One):
    """InfoNCE: the others of the batch are the negatives."""

    def play(self, batch):
        features = self.net(batch["x"])
        return nn.functional.cross_entropy(features @ features.T, torch.arange(len(features)))


class Weighed(One):
    """An adaptive weight, of norms of gradients."""

    def play(self, batch):
        out = self.net(batch["x"])
        one, other = out.square().mean(), out.tanh().mean()
        last = self.net[2].weight
        norms = [torch.autograd.grad(loss, last, retain_graph=True)[0].norm() for loss in (one, other)]
        return one + (norms[0] / norms[1]).detach() * other


class Codebook(One):
    """Sums of what was seen, in a buffer."""

    def __init__(self):
        super().__init__()
        self.net.register_buffer("seen", torch.zeros(3))

    def play(self, batch):
        out = self.net(batch["x"])
        self.net.seen.lerp_(out.detach().sum(0), 0.5)
        return out.square().mean()


class Replaced(Codebook):
    """The same by a new tensor."""

    def play(self, batch):
        out = self.net(batch["x"])
        self.net.seen = self.net.seen.lerp(out.detach().sum(0), 0.5)
        return out.square().mean()


class FirstBatch(One):
    """ActNorm: the first batch sets a weight."""

    def __init__(self):
        super().__init__()
        self.net.register_parameter("scale", nn.Parameter(torch.ones(3)))
        self.begun = False

    def play(self, batch):
        out = self.net(batch["x"])
        if not self.begun:
            self.begun = True
            with torch.no_grad():
                self.net.scale.copy_(out.std(0))
        return (out * self.net.scale).square().mean()


class ByHand(One):
    """A statistic of the samples, kept as an attribute, weighs the next phase's loss."""

    def configure_phases(self):
        yield Phase("look", self.look, "net")
        yield Phase("play", self.play, "net")

    def look(self, batch):
        out = self.net(batch["x"])
        self.weight = out.detach().square().mean()
        return out.square().mean()

    def play(self, batch):
        return self.net(batch["x"]).square().mean() * (1 + self.weight)


class OwnNorms(One):
    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))

    def play(self, batch):
        return self.net(batch["x"]).square().mean()


class Masked(OwnNorms):
    """NumPy's draws, which are the same on each rank, before several batch norms."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))

    def play(self, batch):
        x = batch["x"]
        return self.net(x * torch.from_numpy(np.random.rand(len(x), 1)).to(x)).square().mean()


WRONG = {
    RootOfMean: ("phase 'play': loss 'root' is", "gan.ranks"),
    Contrast: ("phase 'play': loss 'loss' is", "gan.ranks"),
    Weighed: ("phase 'play', player 'net': the gradients of", "gan.ranks"),
    Codebook: ("buffer 'net.seen' is written in a loss or forward, with other values than by one device", "gan.ranks"),
    Replaced: ("buffer 'net.seen' is written in a loss or forward, with other values than by one device", "gan.ranks"),
    FirstBatch: ("weight 'net.scale' is written in a loss or forward, with other values than by one", "gan.ranks"),
    ByHand: ("phase 'play': loss 'loss' is", "gan.ranks"),
    OwnNorms: ("phase 'play': loss 'loss' is", "Trainer(sync_batchnorm=True)"),
}


def test_the_cause_is_named_before_its_consequences(ranks):
    """A wrong sample changes all batch norms after it: they have one line, and the advice begins with the draws."""
    said, _ = ranks(2).run(refused, Masked, policy="ddp", world=2, steps=2, check=True)
    first, *_, last, advice = said.splitlines()[1:]
    assert first.startswith("  - phase 'play': loss 'loss' is") and "buffer 'net.1.running_mean'" in last
    assert "and so are 2 others" in last and said.count("buffer '") == 1
    assert advice.startswith("NumPy and random give all ranks the same numbers")


@pytest.mark.promise("buffers that learn from the rank's samples", "the training of one device, or a refusal by name")
@pytest.mark.promise("a loss that is no mean over samples", "the training of one device, or a refusal by name")
@pytest.mark.promise("statistics kept by hand", "the training of one device, or a refusal by name")
@pytest.mark.parametrize("game", WRONG, ids=lambda game: game.__name__)
@pytest.mark.parametrize("policy", often(["ddp", "zero2"]))
def test_what_differs_from_one_device_is_named(game, policy, ranks):
    message = ranks(2).run(refused, game, policy=policy, world=2, steps=2, check=True, sync_batchnorm=False)
    assert message[0] == message[1]
    assert all(words in message[0] for words in WRONG[game])


@pytest.mark.promise("buffers that learn from the rank's samples")
@pytest.mark.promise("a loss that is no mean over samples")
@pytest.mark.promise("statistics kept by hand")
@pytest.mark.parametrize("game", often(WRONG, list(WRONG)[:3]), ids=lambda game: game.__name__)
def test_the_control_without_the_check_differs_in_silence(game, ranks):
    together = ranks(2).run(train, game, world=2, steps=3, check=False, sync_batchnorm=False)
    assert distance(together[0], train(game, steps=3)) > 1e-6


class OwnWay(One):
    """Each rank decides by its own loss which phase it plays."""

    def configure_phases(self):
        yield Phase("up", self.up, "net")
        yield Phase("down", self.down, "net")

    def training_step(self, batch):
        up, down = self.phases
        self.trainer.strategy.run(up if batch["x"].sum() > 0 else down, batch)

    def up(self, batch):
        return self.net(batch["x"]).square().mean()

    def down(self, batch):
        return -self.up(batch)


@pytest.mark.promise("a turn decided by the rank's own loss", "the training of one device, or a refusal by name")
def test_ranks_that_go_different_ways_are_named(ranks):
    message = ranks(2).run(refused, OwnWay, _halves, world=2, steps=2, check=True)[1]
    assert "rank 0 plays phase 'up'; rank 1 plays phase 'down'" in message


def _halves(step):
    return {"x": torch.cat([torch.ones(8, 6), -torch.ones(8, 6)]).double()}


class ShortTable(One):
    def __init__(self):
        super().__init__()
        self.net.register_buffer("table", torch.arange(4).short())


def test_a_buffer_that_ranks_cannot_send_is_named(ranks):
    for message in ranks(2).run(refused, ShortTable, policy="ddp", world=2, steps=1):
        assert (
            message == "buffer 'net.table' is torch.int16, which ranks cannot send to each other; make it torch.int32"
        )


# ---- what does not ----


class Better(Codebook):
    """The sum over all ranks."""

    def play(self, batch):
        out = self.net(batch["x"])
        self.net.seen.lerp_(all_ranks.sum(out.detach().sum(0)).to(self.net.seen), 0.5)
        return out.square().mean()


class Coarse(Codebook):
    """The sum is rounded to float32 on the way, in a training in float64."""

    def play(self, batch):
        out = self.net(batch["x"])
        self.net.seen.lerp_(all_ranks.sum(out.detach().float().sum(0)).to(self.net.seen), 0.5)
        return (out - self.net.seen).square().mean()


class PastRanks(Codebook):
    """The sum over all ranks, past gan.ranks, as in libraries."""

    def play(self, batch):
        out = self.net(batch["x"])
        total = out.detach().sum(0)
        dist.all_reduce(total)
        self.net.seen.lerp_(total, 0.5)
        return out.square().mean()


def test_a_collective_past_gan_ranks_is_named(ranks):
    for found in ranks(2).run(refused, PastRanks, world=2, steps=1, check=True):
        assert re.search(r"play in test_check\.py:\d+ calls torch\.distributed, in the trial of one device too", found)


@pytest.mark.parametrize("policy", often(["ddp", "zero3", "zero2+bf16"], ["ddp"]))
def test_nothing_else_is_named(policy, ranks):
    """The other games and policies: parity under ddp in their own files, and the matrix."""
    precision = "bf16-mixed" if "bf16" in policy else "64-true"
    for game in (HARD["BatchNorms"], HARD["Micro4"], HARD["Teacher"], Better, Coarse):
        found = ranks(2).run(refused, game, single, policy, 2, steps=1, check=True, precision=precision)
        assert found == [None, None]


class Cancelling(One):
    """The gradient of the last bias is a sum that cancels: there is nothing in it but rounding."""

    def play(self, batch):
        real, fake = self.net(batch["x"]) * 1e-5, self.net(-batch["x"]) * 1e-5
        return nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()


@pytest.mark.parametrize(("bias", "named"), [(1.1e-16, False), (1e-6, True)])
def test_a_sum_that_cancels_on_one_device_alone_is_not_named(bias, named):
    """As of D's last bias in a relativistic loss: rounding moves its gradient of exactly 0 by nothing."""
    together, alone = Trial(World(), 0, "many"), Trial(World(), 0, "one")
    together.norms["play", "net"], alone.norms["play", "net"] = {"w": 1.0, "bias": bias}, {"w": 1.0, "bias": 0.0}
    both = comparison.Comparison([{}], [{}], together, alone, {"play": comparison.ROUNDING[torch.float64]}, set())
    assert bool(both.lines({("gradient", "play", "net", "bias"): 0.0})) == named


def test_room_for_a_sum_that_cancels_is_that_of_the_precision():
    """In bfloat16 each term of the sum is rounded to 4e-3 already."""
    together, alone = Trial(World(), 0, "many"), Trial(World(), 0, "one")
    together.norms["play", "net"], alone.norms["play", "net"] = {"w": 1.0, "bias": 0.03}, {"w": 1.0, "bias": 0.0}
    measured = {("gradient", "play", "net", "bias"): 1.0}
    for rounding, named in ((comparison.COARSE, False), (comparison.ROUNDING[torch.float32], True)):
        both = comparison.Comparison([{}], [{}], together, alone, {"play": rounding}, set())
        assert bool(both.lines(measured)) == named


def test_what_rounding_does_is_measured_and_not_named(ranks):
    for seed in range(2):
        assert ranks(2).run(_refused_of_seed, seed) == [None, None]


def test_the_control_that_measures_nothing_names_rounding(ranks):
    said = [ranks(2).run(_refused_of_seed, seed, 0.0)[0] for seed in range(2)]
    assert any("'2.bias' has norm" in (each or "") for each in said)


def _refused_of_seed(seed, spread=comparison.SPREAD):
    def batches(step):
        return single(1000 * seed + step)

    with mock.patch.multiple(comparison, SPREAD=spread, LEAST=0.0):
        return refused(Cancelling, batches, world=2, steps=2, check=True, precision="32-true")


# ---- nothing remains of it ----


class Stateful(Plain):
    """Everything that a loss can change."""

    def __init__(self):
        super().__init__()
        self.pool, self.past, self.count, self.mean = ImagePool(8), [], 0, torch.zeros(6)
        self.dice = random.Random(3)
        random.seed(4)
        self.register_buffer("w", torch.zeros(6))

    def fool(self, batch):
        fake = self.fake(batch["x"])
        old = self.pool.query(fake)
        self.past.append(self.count)
        self.count += 1
        self.mean = 0.9 * self.mean
        self.mean += 1.0
        self.w.add_(1.0)
        self.register_buffer("late", torch.ones(1))
        coins = random.random() + self.dice.random() + torch.rand(()) + noise.rand((1,), common=True).sum()
        remembered = len(self.past) + self.count + self.mean.sum() + self.w.sum()
        factor = 1 + remembered + 0.1 * coins + all_ranks.mean(old.mean()).detach()
        return (nn.functional.softplus(-self.discriminator(fake)) * factor).mean()


class CastsByHand(One):
    def play(self, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nn.functional.softplus(-self.net(batch["x"].float())).mean()


class CastsASum(CastsByHand):
    def play(self, batch):
        return super().play(batch) * len(batch["x"])


def test_a_loss_in_bfloat16_is_compared_as_coarsely_as_that_rounds(ranks):
    how = dict(world=2, steps=1, check=True, batches=single, precision="32-true")
    assert ranks(2).run(refused, CastsByHand, **how) == [None, None]
    assert "phase 'play': loss 'loss' is " in ranks(2).run(refused, CastsASum, **how)[0]


class CastsItsInput(CastsASum):
    """As one may under mixed precision, without which it fails."""

    def play(self, batch):
        return nn.functional.softplus(-self.net(batch["x"].bfloat16())).mean() * len(batch["x"])


class HalfTeacher(CastsASum):
    """In half precision, as teachers of billions of weights are."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(6, 6).bfloat16()

    def configure_players(self):
        yield from super().configure_players()
        yield Player("teacher", self.teacher)

    def play(self, batch):
        return self.net(self.teacher(batch["x"])).square().mean() * len(batch["x"])


@pytest.mark.parametrize("game", [CastsItsInput, HalfTeacher])
def test_what_needs_mixed_precision_is_tried_in_it(game, ranks):
    how = dict(world=2, steps=1, check=True, batches=single, precision="bf16-mixed")
    assert "phase 'play': loss 'loss' is " in ranks(2).run(refused, game, **how)[0]


class BesideATeacher(HalfTeacher):
    """What a phase without the teacher does wrong is less than bfloat16 rounds."""

    def configure_phases(self):
        yield Phase("play", self.play, "net")
        yield Phase("learn", self.learn, "net")

    def play(self, batch):
        return self.net(batch["x"]).square().mean() * (1 + len(batch["x"]) / 200)

    def learn(self, batch):
        return self.net(self.teacher(batch["x"])).square().mean()


def test_a_phase_beside_one_that_needs_mixed_precision_is_tried_without(ranks):
    said = ranks(2).run(refused, BesideATeacher, world=2, steps=1, check=True, batches=single, precision="bf16-mixed")
    assert "phase 'play': loss 'loss' is " in said[0] and "phase 'learn'" not in said[0]


def test_what_computes_in_half_precision_throughout_is_seen():
    """A text encoder in bfloat16 gets numbers of words, and casts nothing."""
    with Casts() as casts:
        nn.Embedding(2, 2, dtype=torch.bfloat16)(torch.ones(2, dtype=torch.int64)).float()
    assert casts.dtypes == {torch.bfloat16}


class Heard(DummyLogger):
    def __init__(self):
        self.steps = []

    def log_metrics(self, metrics, step=None):
        self.steps.append(step)


class TellsItsLogger(One):
    def play(self, batch):
        self.logger.log_metrics({"mine": 1.0}, self.step)
        return self.net(batch["x"]).square().mean()


def told():
    heard = Heard()
    made = trainer(PhaseStrategy("ddp"), 2, 3, logger=heard, log_every_n_steps=9)
    made.fit(TellsItsLogger(), parts(3, 2))
    return heard.steps


def test_a_logger_hears_nothing_of_a_trial(ranks):
    assert ranks(2).run(told)[0] == [0, 1, 2]


class WritesItsBatch(One):
    def play(self, batch):
        batch["x"].mul_(2)
        return (self.net(batch["x"]) - 1).square().mean()


def test_a_loss_that_writes_into_its_batch_is_tried_on_a_copy(ranks):
    found = [ranks(2).run(train, WritesItsBatch, world=2, steps=3, check=check) for check in (True, False)]
    assert distance(found[0][0], found[1][0]) == 0
    equals(found[0], train(WritesItsBatch, steps=3))


class Ada:
    """An object of the file, and not of the game, that learns in a loss."""

    strength = 0.0  # of the class
    __slots__ = ("p",)

    def __init__(self):
        self.p = 0.0


class Options(dict):
    """A dict whose keys are attributes too."""

    __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__


class Term(nn.Module):
    """A loss that shares its options with the game, as CUT's do."""

    def __init__(self, options):
        super().__init__()
        self.options = options


def counter():
    count, seen = 0, [torch.zeros(3)]

    def total(out):
        nonlocal count
        count += 1
        seen[0] += out.detach().abs().mean()
        return count + seen[0].mean()

    return total


ada, calls, count_up, dice = Ada(), 0, counter(), np.random.default_rng(1)


class Reaching(One):
    """It changes whatever code can reach."""

    def __init__(self):
        super().__init__()
        global ada, calls, count_up, dice
        ada, calls, count_up, dice = Ada(), 0, counter(), np.random.default_rng(1)
        Ada.strength = 0.0
        self.options = Options(weight=1.0, past=deque(maxlen=3))
        self.term, self.array, self.seen = Term(self.options), np.zeros(2), {"batches": set()}
        self.net.register_parameter("codes", nn.Parameter(torch.zeros(3), requires_grad=False))
        self.net.register_buffer("mean", torch.zeros(3), persistent=False)

    def play(self, batch):
        global calls
        out = self.net(batch["x"])
        calls += 1
        ada.p += 0.01 * calls
        Ada.strength += 0.1
        type(self).made = getattr(type(self), "made", 0) + 1
        self.options.weight *= 1.5
        self.term.options.past.append(self.step)
        self.array += 0.5
        self.seen["batches"].add(calls)
        self.net.codes.data.add_(0.1)
        self.net.mean.data += 0.2
        dice.random()
        in_objects = ada.p, Ada.strength, type(self).made, self.term.options.weight, len(self.options.past)
        in_tensors = self.array.sum(), self.net.codes.sum(), self.net.mean.sum()
        others = len(self.seen["batches"]), count_up(torch.ones(3)), dice.random()
        return out.square().mean() * (1 + 0.1 * sum((*in_objects, *in_tensors, *others)))


def reached(policy, world, check):
    if hasattr(Reaching, "made"):
        del Reaching.made
    return train(Reaching, policy=policy, world=world, steps=5, check=check)


@pytest.mark.parametrize("policy", often(["ddp", "zero3", "zero1", "fsdp"], ["zero3"]))
def test_whatever_a_loss_can_reach_is_as_it_was(policy, ranks):
    one = reached("single", 1, False)
    for check in (True, "often", False):
        found = ranks(2).run(reached, policy, 2, check)
        assert distance(found[0], one) < EXACT


def test_the_control_that_puts_nothing_back_sees_another_loss(ranks):
    assert "loss 'loss' is" in ranks(2).run(_reached_without_putting_back)[0]


def _reached_without_putting_back():
    with mock.patch("strategies.check.trial.Snapshot.put_back"):
        return refused(Reaching, world=2, steps=1, check=True)


class WrongOptions(Reaching):
    """One name of the options is written, and the other one read."""

    def play(self, batch):
        self.options.weight = self.net(batch["x"]).detach().mean()
        return self.net(batch["x"]).square().mean() * (1 + self.term.options.weight)


def test_two_names_of_one_object_stay_two_names(ranks):
    assert "phase 'play': loss 'loss' is" in ranks(2).run(refused, WrongOptions, world=2, steps=1, check=True)[0]


class Streams(One):
    """Its loss takes from an iterator, whose items a trial could not put back."""

    def __init__(self):
        super().__init__()
        self.numbers = (number for number in range(100))

    def play(self, batch):
        return self.net(batch["x"]).square().mean() * next(self.numbers)


def test_an_iterator_that_a_loss_could_move_on_is_named_and_nothing_is_tried(ranks):
    assert "a trial would move on the iterator 'numbers'" in ranks(2).run(_warned, Streams)[0]
    assert distance(ranks(2).run(train, Streams, world=2, steps=3, check=True)[0], train(Streams, steps=3)) < EXACT


# ---- draws ----


class Drawing(Plain):
    """Written as for one device, with torch's own noise and dropout."""

    def fake(self, like):
        noise = torch.randn(len(like), 4, dtype=like.dtype)
        return nn.functional.dropout(self.generator(noise + 0.1 * torch.randn_like(noise)), 0.3)

    def judge(self, batch):
        return nn.functional.softplus(self.discriminator(self.fake(batch["x"]).detach())).mean()

    def fool(self, batch):
        return torch.rand(()) - self.discriminator(self.fake(batch["x"])).mean()


class DrawingByTorch(Drawing):
    def configure_phases(self):
        yield from (replace(phase, draws="torch") for phase in super().configure_phases())


class DrawingWrongly(Drawing):
    """Beside the draws there is a mistake."""

    def fool(self, batch):
        return super().fool(batch).exp()


def test_draws_from_torchs_own_generators_hide_nothing(ranks):
    assert ranks(2).run(refused, Drawing, policy="zero2", world=2, steps=1, check=True) == [None, None]
    said = ranks(2).run(refused, DrawingWrongly, policy="zero2", world=2, steps=1, check=True)[0]
    assert "phase 'generator': loss 'loss'" in said


def test_draws_that_cannot_follow_the_samples_are_said(ranks):
    assert "not compared" not in ranks(2).run(_warned, Stateful)[0]
    (first, _) = ranks(2).run(_warned, DrawingByTorch)
    assert "phase 'discriminator', 'generator': not compared with one device, because it draws other" in first


def _warned(game, batches=vectors, steps=1):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(game, batches, world=2, steps=steps, check=True)
    return " ".join(str(each.message) for each in caught)


# ---- where there can be no trial ----


def without_room():
    with mock.patch("strategies.check.one_device.ROOM", {"cpu": 0}):
        return _warned(Plain)


def test_more_samples_than_a_device_has_room_for_are_not_tried_and_that_is_said(ranks):
    said = "the first step is not checked against one device, which may have no memory for 2"
    assert said in ranks(2).run(without_room)[0]
    assert "not checked" not in ranks(2).run(_warned, Plain)[0]


class Pairs(Plain):
    """Two loaders of pairs: two samples of each would look like two rows in each of two items."""

    def train_dataloader(self):
        data = TensorDataset(torch.ones(32, 6, dtype=torch.float64), torch.zeros(32, 6, dtype=torch.float64))
        return {name: GlobalLoader(data, 16) for name in ("one", "other")}

    def judge(self, batch):
        return super().judge({"x": batch["one"][0] + batch["other"][1]})

    def fool(self, batch):
        return super().fool({"x": batch["one"][0]})


def tried_pairs():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(PhaseStrategy("ddp"), 2, 1).fit(Pairs())
    return " ".join(str(each.message) for each in caught)


def test_pairs_are_tried_although_two_samples_of_them_look_like_something_else(ranks):
    assert "not checked" not in ranks(2).run(tried_pairs)[0]


class Remembers(One):
    """It keeps a row for each sample of its first batch, so it cannot be tried on fewer."""

    def __init__(self):
        super().__init__()
        self.first = None

    def play(self, batch):
        if self.first is None:
            self.first = torch.randn(len(batch["x"]), 3, dtype=torch.float64)
        return (self.net(batch["x"]) + self.first).square().mean()


@pytest.mark.parametrize("policy", often(["ddp", "zero1", "zero2", "zero3", "fsdp"], ["zero3"]))
def test_what_fails_on_few_samples_alone_is_trained_and_that_is_said(policy, ranks):
    alone = train(Remembers, steps=4, check=True)
    found = ranks(2).run(_trained_and_warned, Remembers, policy)
    equals([trained for trained, _ in found], alone)
    assert "no comparison with one device: step 1 was tried on 16 samples, and a loss fails" in found[0][1]


@pytest.fixture
def tries(monkeypatch):
    """Trials on the first of two ranks, which meet the other one if it has said that it comes: `store.add(...)`."""
    monkeypatch.setattr(one_device, "PATIENCE", 0.1)
    monkeypatch.setattr("strategies.check.trial.default_store", lambda: made.store)
    world = mock.Mock(size=2, rank=0, device=torch.device("cpu"), **{"gather.return_value": [("key", [])] * 2})
    made = one_device.Tries(mock.MagicMock(step=0), mock.MagicMock(world=world), mock.MagicMock(), mock.Mock())
    made.store, world.gather.return_value = torch.distributed.HashStore(), ["the same"] * 2
    return made


def test_a_rank_that_fails_alone_says_so_and_does_not_wait_for_the_others(tries, monkeypatch):
    """They wait for it in backward, say, so it must not wait for them in turn."""
    agree = mock.Mock(return_value=True)
    monkeypatch.setattr(trial, "agree", agree)
    tries.play.side_effect = ValueError("label 7 is not known")
    with pytest.raises(ValueError, match="label 7"):
        tries({"x": torch.zeros(2, 6)})
    assert not agree.called
    tries.store.add("trial key/2/1", 1)  # the control: the other rank comes
    with pytest.raises(one_device.TooFew, match="label 7"):
        tries({"x": torch.zeros(2, 6)})


def test_a_rank_whose_connection_breaks_does_not_wait_at_all(tries):
    """Another rank has refused the game, and is gone."""
    tries.play.side_effect = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1.")
    tries.store = mock.Mock(add=mock.Mock(side_effect=AssertionError("it waits")))
    with pytest.raises(RuntimeError, match="Connection closed"):
        tries({"x": torch.zeros(2, 6)})


class ByNumPy(One):
    """Times of a diffusion, a number for each sample."""

    def play(self, batch):
        return (self.net(batch["x"]).square().mean(1) * torch.from_numpy(np.random.rand(len(batch["x"])))).mean()


class FrozenNorms(Sum):
    """Its batch norms do not learn, so they are no reason."""

    def __init__(self):
        super().__init__()
        self.net.append(nn.BatchNorm1d(3).eval())


@pytest.mark.parametrize(("game", "by_numpy"), [(ByNumPy, True), (FrozenNorms, False)])
def test_the_reason_is_named_and_no_other(game, by_numpy, ranks):
    said = ranks(2).run(refused, game, world=2, steps=1, check=True, sync_batchnorm=False)[0]
    assert ("NumPy and random give all ranks the same numbers" in said) == by_numpy
    assert "Synchronise batch norms" not in said


class Packs(One):
    """CTGAN: the network sees four samples as one row, and draws for each such pack."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1))

    def play(self, batch):
        share = torch.rand(len(batch["x"]) // 4, 1, 1).repeat(1, 4, 6).view(-1, 6)
        return self.net((share * batch["x"]).view(-1, 24)).square().mean()


class Best(One):
    """Top-k training, which needs more samples than a trial has at first."""

    def play(self, batch):
        return all_ranks.gather(self.net(batch["x"]).sum(1)).topk(12).values.square().mean()


@pytest.mark.parametrize(
    ("game", "room"), [(Packs, 4), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((Best, 4), (Packs, 1)))]
)
def test_what_needs_more_samples_is_tried_with_as_many_as_there_is_room_for(game, room, ranks):
    alone = train(game, steps=4, check=True)
    found = ranks(2).run(_trained_and_warned, game, "ddp", room)
    equals([trained for trained, _ in found], alone)
    assert "no comparison" not in found[0][1]


def _trained_and_warned(game, policy, room=4):
    """`room`: how many times its own batch a device has memory for; a GPU once."""
    with warnings.catch_warnings(record=True) as caught, mock.patch.dict(one_device.ROOM, cpu=room):
        warnings.simplefilter("always")
        found = train(game, policy=policy, world=2, steps=4, check=True)
    return found, " ".join(str(each.message) for each in caught)


class Pooled(One):
    """A pool that is full after its first step. Each rank has the past of its own samples."""

    def __init__(self):
        super().__init__()
        self.pool = ImagePool(1)

    def play(self, batch):
        out = self.net(batch["x"])
        return (out - 0.5 * self.pool.query(out)).square().mean()


def test_a_trial_looks_into_the_pools_of_all_ranks(ranks):
    alone = train(Pooled, steps=12)
    assert distance(ranks(2).run(train, Pooled, world=2, steps=12, check="often")[0], alone) < EXACT


class Grows(One):
    """A bank that gets another shape through `.data`, and a result that is kept for ever."""

    def __init__(self):
        super().__init__()
        self.bank = torch.zeros(1, 3, dtype=torch.float64)
        kept.cache_clear()

    def play(self, batch):
        out = self.net(batch["x"])
        loss = (out - self.bank.mean(0) + kept()).square().mean()
        self.bank.data = torch.cat([self.bank.data, all_ranks.gather(out.detach())])[-20:]
        return loss


@cache
def kept():
    return torch.randn(3, dtype=torch.float64)


def test_what_gets_another_shape_and_what_is_cached_are_put_back(ranks):
    alone = train(Grows, steps=4)
    assert distance(ranks(2).run(train, Grows, world=2, steps=4, check=True)[0], alone) < EXACT


class Lonely(One):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def play(self, batch):
        return (self.gain * self.net(batch["x"])).square().mean()


def test_a_parameter_of_no_player_is_named():
    with pytest.warns(UserWarning, match="'gain' is a parameter of no player, and never learns; put it into a player"):
        train(Lonely, steps=1)


class Unsorted(Plain):
    """A batch with a column that no one can cut."""

    def judge(self, batch):
        return super().judge({"x": batch["x"]})

    def fool(self, batch):
        return super().fool({"x": batch["x"]})


def unsorted(step):
    return {**vectors(step), "words": ["a"] * 5}


def test_a_batch_that_cannot_be_cut_is_not_tried_and_that_is_said(ranks):
    said = ranks(2).run(_warned, Unsorted, unsorted)[0]
    assert "because its batch cannot be cut: the first samples: the batch has 8 samples" in said


class OfTwo(Plain):
    """Its batch comes from two loaders."""

    def judge(self, batch):
        few = self.discriminator(batch["few"]["x"])
        return {**super().judge(batch["many"]), "few": few.square().mean()}

    def fool(self, batch):
        return super().fool(batch["many"])


def of_two_loaders(world):
    game, strategy = OfTwo(), PhaseStrategy("ddp")
    with warnings.catch_warnings(record=True) as caught, mock.patch.dict(os.environ, PL_GLOBAL_SEED="11"):
        warnings.simplefilter("always")
        loaders = {name: parts(2, world, each) for name, each in (("many", vectors), ("few", two_alone))}
        trainer(strategy, world, 2).fit(game, loaders)
    return snapshot(game, strategy), " ".join(str(each.message) for each in caught)


def two_alone(step):
    return {"x": vectors(step + 50)["x"][:2]}


def test_a_loader_with_one_sample_on_each_rank_beside_another_is_not_taken_for_a_constant(ranks):
    (found, said), _ = ranks(2).run(of_two_loaders, 2)
    assert distance(found, of_two_loaders(1)[0]) < EXACT
    assert "one of its loaders gives each rank one sample" in said


class AsLongAsTheLongest(One):
    """Each rank's loader pads its samples to the longest one of its own batch."""

    def on_before_batch_transfer(self, batch, _):
        return {"x": batch["x"][:, : 6 - dist.get_rank()]}

    def play(self, batch):
        x = batch["x"]
        return self.net(nn.functional.pad(x, (0, 6 - x.shape[1]))).square().mean()


class DividesByItsMask(AsLongAsTheLongest):
    def play(self, batch):
        return super().play(batch) * 50 / (batch["x"] > 0).sum()


def test_where_ranks_have_samples_of_other_lengths_the_first_ranks_are_dealt_out(ranks):
    said = ranks(2).run(_warned, AsLongAsTheLongest, vectors, 2)[0]
    assert "samples of batch['x'] have another shape on another rank, as where a loader" in said
    for found in ranks(2).run(refused, DividesByItsMask, world=2, steps=1, check=True):
        assert "In a trial of step 0, on a few samples of each rank, these differ:" in found


# ---- phases that are played later, or only sometimes ----


class Later(One):
    """Its second phase is not lawful, and begins at step 2."""

    def configure_phases(self):
        yield Phase("net", lambda batch: self.net(batch["x"]).square().mean(), "net")
        yield Phase("late", self.late, "net", start=2)

    def late(self, batch):
        return self.net(batch["x"]).mean().square()


class Sometimes(Later):
    """The same, with a loss that is not ready before `when` says so."""

    def configure_phases(self):
        yield Phase("net", self.count, "net")
        yield Phase("late", self.late, "net", when=lambda: hasattr(self, "scale"))

    def count(self, batch):
        if self.step == 2:
            self.scale = 2.0
        return self.net(batch["x"]).square().mean()

    def late(self, batch):
        return super().late(batch) * self.scale


class Thrown(Sometimes):
    """The same, where dice say in each step whether the loss is ready: in step 2 for the first time."""

    def on_fit_start(self):
        random.seed(9)

    def configure_phases(self):
        yield Phase("net", self.throw, "net")
        yield Phase("late", self.late, "net", when=lambda: self.scale is not None)

    def throw(self, batch):
        self.scale = 2.0 if random.random() < 0.3 else None
        return self.net(batch["x"]).square().mean()


class Counting(Later):
    """The same, where `when` counts how often it is asked."""

    asked = 0

    def configure_phases(self):
        yield Phase("net", lambda batch: self.net(batch["x"]).square().mean(), "net")
        yield Phase("late", self.late, "net", when=self.third)

    def third(self):
        self.asked += 1
        return self.asked % 3 == 0


class Lawful(Thrown):
    def late(self, batch):
        return self.net(batch["x"]).mean() * self.scale


@pytest.mark.parametrize("game", often([Later, Sometimes, Thrown, Counting], [Later, Thrown, Counting]))
def test_a_phase_is_tried_before_its_first_time_or_with_a_when_after_it(game, ranks):
    assert ranks(2).run(refused, game, policy="zero3", world=2, steps=2, check=True) == [None, None]
    message = ranks(2).run(refused, game, policy="zero3", world=2, steps=3, check=True)[0]
    assert "phase 'late': loss 'loss'" in message


def test_a_phase_is_tried_only_where_its_when_says_yes(ranks):
    assert "no comparison" not in ranks(2).run(_warned, Lawful, steps=6)[0]


class OnItsOwn(Later):
    """Whether its second phase is played hangs on the rank's own samples."""

    def configure_phases(self):
        yield Phase("net", self.look, "net")
        yield Phase("late", lambda batch: self.net(batch["x"]).square().mean(), "net", when=lambda: self.mean > 0)

    def look(self, batch):
        self.mean = batch["x"].mean().item()
        return self.net(batch["x"]).square().mean()


def test_a_when_that_says_other_things_on_other_ranks_is_named(ranks):
    said = ranks(2).run(_warned, OnItsOwn, _halves, 3)[0]
    assert "phase 'late': in step 1 its `when` is True on the first rank, which decides, and False on others" in said
