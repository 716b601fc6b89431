"""The first step is tried together and alone. What differs is named, and nothing else is."""

import copy
import os
import random
import re
import sys
import warnings
from collections import deque
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache, partial
from itertools import chain, count
from types import ModuleType
from typing import Any, ClassVar
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
from gan.files.errors import UserError
from gan.pool import ImagePool
from strategies import PhaseStrategy
from strategies.batches.micro_batches import Batches
from strategies.check import comparison, one_device, samples, trial
from strategies.check.left_behind import LeftBehind
from strategies.check.snapshot import MovesOn, Snapshot, StandIn
from strategies.check.trial import Trial
from strategies.objects.reachable import Reachable
from strategies.observers import Casts
from strategies.world import World
from tests.support.hard_games import HARD, One, Plain
from tests.support.parity import equals, often, parts, refused, single, snapshot, train, trainer, vectors, warned


def row(game, *words, unsaid=(), slow=False, **how):
    """A row of a table: a game, what is said of it and what is not, and how it is tried."""
    return pytest.param(game, words, unsaid, how, id=game.__name__, marks=[pytest.mark.slow] * slow)


def tried(game, batches=vectors, policy="ddp", steps=1, check=True, room=4, **settings):
    """What comes of a training on two ranks, if it is not refused, and what this rank says.

    `room`: how many times its own batch a device has memory for; a GPU once.
    """
    with warned() as said, mock.patch.dict(samples.ROOM, cpu=room):
        try:
            found = train(game, batches, policy, 2, steps, check=check, **settings)
        except UserError as error:
            return None, str(error)
    return found, " ".join(said)


def says(said, words, unsaid):
    return all(each in said for each in words) and not any(each in said for each in unsaid)


# ---- what differs ----


ON_GRADIENTS = "belongs into on_before_optimizer_step"


class ClipsAlike(One):
    """What its hooks leave of a gradient is the same on each rank, and on one device."""

    def play(self, batch):
        for weight in self.net.parameters():
            if weight.requires_grad and not weight._backward_hooks:
                weight.register_hook(lambda gradient: gradient.clamp(max=1e-3))
        return sum(weight.sum() for weight in self.net.parameters()) * batch["x"].abs().mean()


class VirtualBatches(One):
    """As StyleGAN-T's BatchNormLocal: statistics of four samples each, of which few samples have too few."""

    def play(self, batch):
        x = batch["x"].view(-1, min(4, len(batch["x"])), 6)
        return self.net((x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1e-3).sqrt()).square().mean()


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
        self.net.seen.lerp_(self.sum_of(out.detach()).to(self.net.seen), 0.5)
        return out.square().mean()

    def sum_of(self, out):
        return out.sum(0)


class Attends(One):
    """Attention over the batch, by an author who has forgotten `batch_first`. Its weights are one for each pair."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([nn.MultiheadAttention(6, 2, dtype=torch.float64)])

    def play(self, batch):
        rows = batch["x"].unsqueeze(1)
        return self.net[0](rows, rows, rows)[0].square().mean()


class Scratch(One):
    """A buffer in the shape of the batch, filled anew for each, as ESRGAN's gradient penalty has it."""

    scale = staticmethod(torch.ones_like)

    def __init__(self):
        super().__init__()
        self.register_buffer("ones", torch.empty(0, dtype=torch.float64), persistent=False)

    def play(self, batch):
        x = batch["x"].detach().requires_grad_()
        score = self.net(x)
        self.ones.resize_(score.shape).copy_(self.scale(score.detach()))
        return torch.autograd.grad(score, x, self.ones.clone(), create_graph=True)[0].square().sum(1).mean()


class OwnScratch(Scratch):
    scale = staticmethod(torch.abs)


class Replaced(Codebook):
    """The same by a new tensor, after a batch norm, which differs too where nothing synchronises it."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))

    def play(self, batch):
        out = self.net(batch["x"])
        self.net.seen = self.net.seen.lerp(self.sum_of(out.detach()), 0.5)
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
        return super().play(batch) * (1 + self.weight)


class Masked(One):
    """NumPy's draws, which are the same on each rank, before several batch norms."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))

    def play(self, batch):
        x = batch["x"]
        return self.net(x * torch.from_numpy(np.random.rand(len(x), 1)).to(x)).square().mean()


class Spread(nn.Module):
    def forward(self, x):
        return x / x.abs().max()


class Padded(One):
    """A network that looks at all samples, among several that do not; fakes and reals go through it in two blocks."""

    def __init__(self):
        super().__init__()
        self.net.insert(1, Spread())

    def play(self, batch):
        x = batch["x"] + torch.rand_like(batch["x"])
        return self.net(torch.cat([x, x.flip(1)])).square().mean()


class Patches(nn.Linear):
    """All columns of a first head, then those of a second one, as FastGAN's discriminator returns them."""

    def forward(self, x):
        first, second = super().forward(x).split([3, 5], dim=1)
        return torch.cat([first.reshape(-1), second.reshape(-1)])


class OfPatches(One):
    def __init__(self):
        super().__init__()
        self.net = Patches(6, 8)

    def play(self, batch):
        found = self.net(batch["x"])
        return (found * torch.rand_like(found)).square().mean()


FORMULA = (
    "In phase 'play' every module that is called gets and returns the same as on one device: look at the loss's own "
    "formula."
)


class Within(One):
    """A network that divides by what it has of the batch, between two layers; and is told which samples are which."""

    def __init__(self):
        super().__init__()
        self.net = Inside()

    def play(self, batch):
        x = batch["x"]
        return self.net(x, torch.arange(len(x)) * 0).square().mean()


class Inside(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.kind, self.last = nn.Linear(6, 8), nn.Embedding(4, 8), nn.Linear(8, 3)

    def forward(self, x, kind):
        y = self.first(x) + self.kind(kind)
        return self.last(input=y / y.abs().max())


class Mislabelled(Within):
    def play(self, batch):
        x = batch["x"]
        return self.net(x, torch.randperm(len(x)) % 2).square().mean()


class OneByOne(One):
    """A network is called for each sample, and the mistake is another one."""

    def play(self, batch):
        return torch.stack([self.net(row[None]).square().mean() for row in batch["x"]]).sum()


class OwnDice(One):
    def play(self, batch):
        x, dice = batch["x"], torch.Generator().manual_seed(self.global_rank)
        return self.net(x * torch.rand(x.shape, generator=dice, dtype=x.dtype)).square().mean()


class Least(One):
    """A minimum for each class, infinite until the class comes, beside what is NaN and never read."""

    of_all = staticmethod(all_ranks.gather)

    def __init__(self):
        super().__init__()
        self.net.register_buffer("least", torch.full((3,), torch.inf))
        self.net.register_buffer("unread", torch.full((2,), torch.nan))

    def play(self, batch):
        self.net.least[0] = torch.minimum(self.net.least[0], self.of_all(batch["x"]).min())
        return super().play(batch) * (1 + self.net.least[0] ** 2)


class OwnLeast(Least):
    of_all = staticmethod(torch.abs)


class Spectrum(One):
    """A running spectrum of a rank's own samples, of which only the imaginary part differs."""

    def __init__(self):
        super().__init__()
        self.net.register_buffer("waves", torch.zeros(4, dtype=torch.complex128))

    def play(self, batch):
        self.net.waves.lerp_(1j * torch.fft.rfft(batch["x"]).mean(0).imag, 0.1)
        return super().play(batch)


@contextmanager
def quiet():
    with warnings.catch_warnings():
        yield


numbers = count()


class Idle(One):
    """It has iterators that no loss asks for an item, also the one that contextlib keeps in a decorator."""

    def __init__(self):
        super().__init__()
        self.number, self.head = next(numbers), {"weights": filter(torch.is_tensor, self.net.parameters())}
        self.moved = [item for item in self.head["weights"] if item.numel() < 0]

    @quiet()
    def play(self, batch):
        return {"root": self.net(batch["x"]).square().mean().sqrt()}


LOSS = "phase 'play': loss 'loss' is "
WRITTEN = "is written in a loss or forward, with other values than by one device"


def test_the_cause_is_named_before_its_consequences(ranks):
    """A wrong sample changes all batch norms after it: they have one line, and the advice begins with the draws."""
    said, _ = ranks(2).run(refused, Masked, policy="ddp", world=2, steps=2, check=True)
    first, *_, last, begins, advice = said.splitlines()[1:]
    assert first.startswith("  - phase 'play': loss 'loss' is") and "buffer 'net.1.running_mean'" in last
    assert ", and 2 more" in last and said.count("buffer '") == 1
    assert begins == "In phase 'play' it begins where 'net' (Sequential) is given other values."
    assert advice.startswith("NumPy and random give all ranks the same numbers")


class OwnWay(One):
    """Each rank decides by its own loss which phase it plays."""

    def configure_phases(self):
        yield Phase("up", self.play, "net")
        yield Phase("down", lambda batch: -self.play(batch), "net")

    def training_step(self, batch):
        up, down = self.phases
        self.trainer.strategy.run(up if batch["x"].sum() > 0 else down, batch)


def halves(step):
    return {"x": torch.cat([torch.ones(8, 6), -torch.ones(8, 6)]).double()}


def pairs(step):
    return {"x": vectors(step)["x"][:2]}


class DrawsForAll(One):
    """A hook draws one row, and ranks have one sample: whose the row is only a trial shows."""

    def on_after_batch_transfer(self, batch, _):
        return {"x": batch["x"] + torch.randn(1, 6, dtype=torch.float64)}

    def play(self, batch):
        return self.net(batch["x"]).square().mean()


class UpdatesByChance(One):
    of_play: ClassVar[Any] = {"update": lambda: torch.rand(()) < 2}

    def play(self, batch):
        return self.net(batch["x"] - batch["x"].mean(0)).square().mean()


class Coin(One):
    """A draw for the whole batch decides whether ranks meet in a batch norm."""

    def __init__(self):
        super().__init__()
        # Before a norm a bias has the gradient 0, which rounds.
        self.net = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def play(self, batch):
        x = batch["x"].repeat_interleave(2, 0) + torch.rand_like(batch["x"]).repeat_interleave(2, 0)
        return (self.net(x) if torch.rand(1).item() < 0.5 else self.net[0](x)).square().mean()


class ShortTable(One):
    def __init__(self):
        super().__init__()
        self.net.register_buffer("table", torch.arange(4).short())


class CastsByHand(One):
    def play(self, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return nn.functional.softplus(-self.net(batch["x"].float())).mean()


class HalfTeacher(One):
    """In half precision, as teachers of billions of weights are."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(6, 6).bfloat16()

    def configure_players(self):
        yield from super().configure_players()
        yield Player("teacher", self.teacher)

    def play(self, batch):
        return self.net(self.teacher(batch["x"])).square().mean() * len(batch["x"])


class BesideATeacher(HalfTeacher):
    """What a phase without the teacher does wrong is less than bfloat16 rounds."""

    def configure_phases(self):
        yield Phase("play", self.play, "net")
        yield Phase("learn", lambda batch: self.net(self.teacher(batch["x"])).square().mean(), "net")

    def play(self, batch):
        return One.play(self, batch) * (1 + len(batch["x"]) / 200)


class ByNumPy(One):
    """Times of a diffusion, a number for each sample."""

    def play(self, batch):
        return (self.net(batch["x"]).square().mean(1) * torch.from_numpy(np.random.rand(len(batch["x"])))).mean()


class FrozenNorms(One):
    """Its batch norms do not learn, so they are no reason."""

    def __init__(self):
        super().__init__()
        self.net.append(nn.BatchNorm1d(3).eval())

    def play(self, batch):
        return self.net(batch["x"]).square().sum()


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


class Drawing(Plain):
    """Written as for one device, with torch's own noise and dropout."""

    def fake(self, like):
        noise = torch.randn(len(like), 4, dtype=like.dtype)
        return nn.functional.dropout(self.generator(noise + 0.1 * torch.randn_like(noise)), 0.3)

    def judge(self, batch):
        return nn.functional.softplus(self.discriminator(self.fake(batch["x"]).detach())).mean()

    def fool(self, batch):
        return torch.rand(()) - self.discriminator(self.fake(batch["x"])).mean()


class DrawingWrongly(Drawing):
    """Beside the draws there is a mistake."""

    def fool(self, batch):
        return super().fool(batch).exp()


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
        if "made" in vars(type(self)):  # another test may have trained the class in this process
            del type(self).made
        self.options = Options(weight=1.0, past=deque(maxlen=3))
        self.term, self.array, self.seen = Term(self.options), np.zeros(2), {"batches": set()}
        self.fixed = np.frombuffer(b"read-only", np.uint8)
        self.pattern = re.compile("x", re.ASCII | re.VERBOSE)  # compiled, as Cython's functions: nothing in it is set
        self.net.register_parameter("codes", nn.Parameter(torch.zeros(3), requires_grad=False))
        self.net.register_buffer("mean", torch.zeros(3), persistent=False)

    def play(self, batch):
        global calls
        out = self.net(batch["x"])
        calls += 1
        ada.p += 0.01 * calls
        Ada.strength += 0.1
        type(self).made = vars(type(self)).get("made", 0) + 1
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


class WrongOptions(Reaching):
    """One of two names of the options is written, and the other one read."""

    def play(self, batch):
        self.options.weight = self.net(batch["x"]).detach().mean()
        return One.play(self, batch) * (1 + self.term.options.weight)


class Thrown(One):
    """Its second phase is not lawful, and dice say in each step whether it is ready: in step 2 for the first time."""

    def on_fit_start(self):
        random.seed(9)

    def configure_phases(self):
        yield Phase("net", self.play, "net")
        yield Phase("late", self.late, "net", when=lambda: self.scale is not None)

    def play(self, batch):
        self.scale = 2.0 if random.random() < 0.3 else None
        return super().play(batch)

    def late(self, batch):
        return self.net(batch["x"]).mean().square() * self.scale


BY_NUMPY = "NumPy and random give all ranks the same numbers"
SINGLE, MIXED = ({"batches": single, "precision": each} for each in ("32-true", "bf16-mixed"))
APART = {"sync_batchnorm": False}


@pytest.mark.promise("buffers that learn from the rank's samples", "the training of one device, or a refusal by name")
@pytest.mark.promise("a loss that is no mean over samples", "the training of one device, or a refusal by name")
@pytest.mark.promise("statistics kept by hand", "the training of one device, or a refusal by name")
@pytest.mark.promise("a turn decided by the rank's own loss", "the training of one device, or a refusal by name")
@pytest.mark.parametrize(
    ("game", "words", "unsaid", "how"),
    [
        # Five more are on the page that tests/system/test_porting.py plays.
        row(Idle, "phase 'play': loss 'root' is", "gan.ranks", FORMULA, **APART),
        row(Replaced, f"buffer 'net.seen' {WRITTEN}, and ", **APART),
        row(OwnScratch, f"buffer 'ones' {WRITTEN}", **APART),
        row(FirstBatch, f"weight 'net.scale' {WRITTEN}", "gan.ranks", **APART),
        row(ByHand, LOSS, "gan.ranks", **APART, slow=True),
        row(OwnLeast, f"buffer 'net.least' {WRITTEN}\n", **APART),
        row(Spectrum, f"buffer 'net.waves' {WRITTEN}\n", **APART),
        row(OwnWay, "rank 0 plays phase 'up'; rank 1 plays phase 'down'", batches=halves),
        row(ShortTable, "buffer 'net.table' is torch.int16, which ranks cannot send to each other; make it torch.int3"),
        row(HalfTeacher, LOSS, **MIXED),
        row(BesideATeacher, LOSS, unsaid=("phase 'learn'",), **MIXED),
        row(Attends, "begins where 'net.0' (MultiheadAttention) returns other values for the same input"),
        row(Padded, "begins where 'net.1' (Spread) returns other values for the same input", unsaid=("draw", FORMULA)),
        row(DrawsForAll, "step 0 drew other numbers than one device", batches=pairs),
        row(
            OfPatches, "same as on one device: look at the loss's own formula.\nA draw must", "Phase 'play' draws [16]"
        ),
        row(Within, "begins within 'net' (Inside), where 'net.last' (Linear) is given other values", unsaid=("draw",)),
        row(Mislabelled, "begins where 'net' (Inside) is given other values.\nA draw must", "draws [2] once for the"),
        row(
            OwnDice,
            "'net' (Sequential) is given other values on another rank, for the samples of all.\nWith generator=",
        ),
        row(ByNumPy, BY_NUMPY, unsaid=("Synchronise batch norms",), **APART),
        row(UpdatesByChance, LOSS, unsaid=("not compared",), slow=True),
        row(OneByOne, LOSS, unsaid=("begins", "look at"), slow=True),
        row(FrozenNorms, LOSS, unsaid=("Synchronise batch norms", BY_NUMPY), **APART, slow=True),
        row(DividesByItsMask, "In a trial of step 0, on a few samples of each rank, these differ:"),
        row(DrawingWrongly, "phase 'generator': loss 'loss'", policy="zero2"),
        row(WrongOptions, LOSS),
        row(ClipsAlike, "phase 'play', player 'net': the gradients of 4 of 4 weights", ON_GRADIENTS),
        row(Weighed, "phase 'play', player 'net': the gradients of", "gan.ranks", unsaid=(ON_GRADIENTS,), **APART),
        row(Thrown, "phase 'late': loss 'loss'", steps=3, policy="zero3"),
    ],
)
def test_what_differs_from_one_device_is_named(game, words, unsaid, how, ranks):
    (trained, said), others = ranks(2).run(tried, game, **how)
    assert trained is None and others == (None, said)
    assert says(said, words, unsaid), said


# ---- what does not ----


class Better(Codebook):
    """The sum over all ranks."""

    def sum_of(self, out):
        return all_ranks.sum(out.sum(0))


class Coarse(Codebook):
    """The sum is rounded to float32 on the way, in a training in float64."""

    def play(self, batch):
        super().play(batch)
        return (self.net(batch["x"]) - self.net.seen).square().mean()

    def sum_of(self, out):
        return all_ranks.sum(out.float().sum(0))


class OwnGroup(Codebook):
    """A sum of the ranks' means, where one device has a mean, over a group of the game's own."""

    def setup(self, stage):
        self.ranks = dist.new_group() if dist.is_initialized() else None

    def sum_of(self, out):
        total = out.mean(0)
        dist.all_reduce(total, group=self.ranks)
        return total


class OwnGroupsMean(OwnGroup):
    """The number of ranks is asked in three ways, each of which counts: a trial forgives a loss that fails."""

    def sum_of(self, out):
        dist.monitored_barrier()
        mean = super().sum_of(out) / self.ranks.size()
        return mean * dist.get_world_size(self.ranks) / int(os.environ["WORLD_SIZE"])


class ByTrainer(One):
    def play(self, batch):
        return super().play(batch) / self.trainer.world_size


class ByLightning(One):
    """Right, and a log that only the first rank has."""

    def play(self, batch):
        seen = self.all_gather(self.net(batch["x"]).detach())
        log = [] if self.trainer.is_global_zero else None
        if self.global_rank == 0:
            log.append(seen)
        return (self.net(batch["x"]) - seen.mean()).square().mean()


class ByNumber(One):
    """Right, as contrastive losses are published: with the rank's own rows in the place of those that have come."""

    def play(self, batch):
        y = self.net(batch["x"])
        every = [torch.zeros_like(y) for _ in range(dist.get_world_size())] if dist.is_initialized() else [y]
        if dist.is_initialized():
            dist.all_gather(every, y.detach())
            every[dist.get_rank()] = y
        own = torch.arange(len(y)) + (len(y) * dist.get_rank() if dist.is_initialized() else 0)
        return (y - torch.cat(every).detach()[own].roll(1, 1)).square().mean()


PAST_RANKS = [ByLightning, ByNumber, OwnGroupsMean]


def refused_as_launched(game):
    """With a variable of launchers, which OwnGroupsMean reads."""
    with mock.patch.dict(os.environ, WORLD_SIZE="2"):
        return refused(game, world=2, steps=1, check=True)


@pytest.mark.parametrize("game", [*PAST_RANKS, OwnGroup, ByTrainer])
def test_one_device_finds_no_other_rank_past_gan_ranks_either(game, ranks):
    for found in ranks(2).run(refused_as_launched, game):
        if game in PAST_RANKS:
            assert found is None
        else:
            assert game is ByTrainer or re.search(r"sum_of in test_check\.py:\d+ calls torch\.distributed", found)
            assert "would not train as one device does" in found


@pytest.mark.parametrize("policy", often(["ddp", "zero3", "zero2+bf16"], ["ddp"]))
def test_nothing_else_is_named(policy, ranks):
    """Under ddp other games are tried in scenes."""
    others = () if policy == "ddp" else ("BatchNorms", "Micro4", "Teacher")
    precision = "bf16-mixed" if "bf16" in policy else "64-true"
    for game in (Better, Coarse, *map(HARD.get, others)):
        found = ranks(2).run(refused, game, single, policy, 2, steps=1, check=True, precision=precision)
        assert found == [None, None]


@pytest.mark.parametrize(
    ("game", "how"),
    [(CastsByHand, SINGLE), (Least, {"steps": 2}), (Drawing, {"policy": "zero2"})],
)
def test_nor_is_rounding_or_a_draw(game, how, ranks):
    assert ranks(2).run(refused, game, world=2, check=True, **{"steps": 1, **how}) == [None, None]


class Cancelling(One):
    """The gradient of the last bias is a sum that cancels: there is nothing in it but rounding."""

    def play(self, batch):
        real, fake = self.net(batch["x"]) * 1e-5, self.net(-batch["x"]) * 1e-5
        return nn.functional.softplus(-real).mean() + nn.functional.softplus(fake).mean()


class Copied(GanModule):
    """A fake score begins as a copy of the teacher (SiD, DMD2), so the generator's first gradient is all rounding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.teacher = nn.Linear(6, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
        self.fake = copy.deepcopy(self.teacher)

    def configure_players(self):
        yield Player("net", self.net, partial(Adam, lr=1e-3))
        yield Player("fake", self.fake, partial(Adam, lr=1e-3))
        yield Player("teacher", self.teacher)

    def configure_phases(self):
        yield Phase("score", lambda batch: (self.fake(self.net(batch["x"])) - 1).square().mean(), "fake")
        yield Phase("play", self.play, "net")

    def play(self, batch):
        made = self.net(batch["x"])
        taught = self.teacher(made * (1 + 2**-52 * dist.get_rank()))  # as a pipeline rounds otherwise
        return ((taught - self.fake(made)) * (taught - made)).mean()


class CopiedOnOneRank(Copied):
    def play(self, batch):
        return super().play(batch) + 1e-12 * dist.get_rank() * self.net(batch["x"]).mean()


class RoundsOtherwise(One):
    """As a GPU may on each rank, if it need not keep all bits of float32."""

    def play(self, batch):
        rounds = [each.fp32_precision != "ieee" for each in (torch.backends.cuda.matmul, torch.backends.cudnn.conv)]
        return super().play({"x": batch["x"] * (1 + 0.1 * sum(rounds) * dist.get_rank())})


def _tf32(how):
    backends = torch.backends
    with ExitStack() as stack:
        for of, name in ((backends.cudnn.conv, "fp32_precision"), (backends.cuda.matmul, "fp32_precision")):
            stack.callback(setattr, of, name, getattr(of, name))
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        if how == "older":
            torch.set_float32_matmul_precision("medium")
        else:
            backends.cuda.matmul.fp32_precision = backends.cudnn.conv.fp32_precision = "tf32"
        said = refused(RoundsOtherwise, world=2, steps=1, check=True)
        older = torch.get_float32_matmul_precision() if how == "older" else "medium"
        return said, older, backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision


@pytest.mark.parametrize("how", ["older", "newer"])
def test_a_trial_keeps_all_bits_of_float32_on_gpus(how, ranks):
    """Torch has the setting in two forms. Training keeps what was typed."""
    assert ranks(2).run(_tf32, how) == [(None, "medium", "tf32", "tf32")] * 2


@pytest.mark.parametrize(
    ("bias", "rounds", "rounding", "named"),
    [
        # As of D's last bias in a relativistic loss: rounding moves its gradient of exactly 0 by nothing.
        (1.1e-16, 0.0, comparison.ROUNDING[torch.float64], False),
        (1e-6, 0.0, comparison.ROUNDING[torch.float64], True),
        # In bfloat16 each term of the sum is rounded to 4e-3 already.
        (0.03, 0.1, comparison.COARSE, False),
        (0.03, 0.1, comparison.ROUNDING[torch.float32], True),
    ],
)
def test_a_sum_that_cancels_has_the_room_of_its_precision(bias, rounds, rounding, named):
    together, alone = (Trial(World(), 0, key, LeftBehind(GanModule(), Batches())) for key in ("many", "one"))
    together.norms["play", "net"], alone.norms["play", "net"] = {"w": 1.0, "bias": bias}, {"w": 1.0, "bias": 0.0}
    both = comparison.Comparison([{}], [{}], together, alone, {"play": rounding}, set())
    assert bool(both.lines({("gradient", "play", "net", "bias"): rounds})) == named


def test_what_rounding_does_is_measured_and_not_named(ranks):
    for seed in range(2):
        assert ranks(2).run(_refused_of_seed, seed) == [None, None]


def test_a_gradient_that_is_all_rounding_is_not_named_but_what_is_beside_it(ranks):
    assert ranks(2).run(refused, Copied, world=2, steps=1, check=True) == [None, None]
    for said in ranks(2).run(refused, CopiedOnOneRank, world=2, steps=1, check=True):
        assert "player 'net': the gradients of 2 of 2 weights" in said


def _refused_of_seed(seed):
    def batches(step):
        return single(1000 * seed + step)

    with mock.patch.object(comparison, "LEAST", 0.0):
        return refused(Cancelling, batches, world=2, steps=2, check=True, precision="32-true")


def test_what_computes_in_half_precision_throughout_is_seen():
    """A text encoder in bfloat16 gets numbers of words, and casts nothing."""
    with Casts() as casts:
        nn.Embedding(2, 2, dtype=torch.bfloat16)(torch.ones(2, dtype=torch.int64)).float()
    assert casts.dtypes == {torch.bfloat16}


# ---- nothing remains of it, and where there can be none that is said ----


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


class WritesItsBatch(One):
    def play(self, batch):
        batch["x"].mul_(2)
        return (self.net(batch["x"]) - 1).square().mean()


class Streams(One):
    """Its loss takes from an iterator, whose items a trial could not put back."""

    def __init__(self):
        super().__init__()
        self.numbers = (number for number in range(100))

    def play(self, batch):
        return super().play(batch) * next(self.numbers)


class StreamsByTuple(One):
    """In a tuple nothing else can be put in its place."""

    def __init__(self):
        super().__init__()
        self.both = 1, iter(range(100))

    def play(self, batch):
        return super().play(batch) * next(self.both[1])


class StreamsQuietly(Streams):
    """It hides that it may not have an item now."""

    def play(self, batch):
        with suppress(Exception):
            return super().play(batch)
        return One.play(self, batch)


class DrawingByTorch(Drawing):
    def configure_phases(self):
        yield from (replace(phase, draws="torch") for phase in super().configure_phases())


class Remembers(One):
    """It keeps a row for each sample of its first batch, so it cannot be tried on fewer."""

    def __init__(self):
        super().__init__()
        self.first = None

    def play(self, batch):
        if self.first is None:
            self.first = torch.randn(len(batch["x"]), 3, dtype=torch.float64)
        return (self.net(batch["x"]) + self.first).square().mean()


class NanInTheFirst(One):
    """The gradient of its player's first weight is not finite."""

    def play(self, batch):
        return super().play(batch) + (self.net[0].weight[0, 0] * 0).sqrt()


SEEN: list = []


class SeesTwice(Plain):
    """A hook in a block fills a list of the program, in which +recompute leaves more than the loss has asked for."""

    def __init__(self):
        super().__init__()
        self.discriminator[1].register_forward_hook(lambda *given: SEEN.append(given[-1]))

    def judge(self, batch):
        losses = super().judge(batch)
        SEEN.clear()
        return losses

    def fool(self, batch):
        loss = super().fool(batch)
        (_,) = SEEN
        SEEN.clear()
        return loss


def said_by(game, policy):
    with warned() as said, suppress(ValueError):
        train(game, policy=policy, world=2, check=True)
    return " ".join(said)


def test_recompute_is_named_where_a_loss_fails_with_it_alone(ranks):
    said = ranks(2).run(said_by, SeesTwice, "ddp+recompute")[0]
    assert "loss fails: too many values to unpack (expected 1)" in said and "a larger batch" not in said
    assert "Without option recompute of player generator and discriminator none fails. With option rec" in said


class FailsOnFew(One):
    """A trial's backward fails when it has reduced gradients of some blocks."""

    of_net: ClassVar = {"blocks": ("1", "2", "3")}

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), *(nn.Sequential(nn.Linear(6, 6)) for _ in range(3)))

    def play(self, batch):
        x = self.net[0](batch["x"])
        x.register_hook(self.refuse_few)
        return self.net[1:](x).square().mean()

    def refuse_few(self, slope):
        if len(slope) < 8:
            raise ArithmeticError("too few samples")


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


class Unsorted(Plain):
    """A batch with a column that no one can cut."""

    def judge(self, batch):
        return super().judge({"x": batch["x"]})

    def fool(self, batch):
        return super().fool({"x": batch["x"]})


def unsorted(step):
    return {**vectors(step), "words": ["a"] * 5}


class OnItsOwn(One):
    """Whether its second phase is played hangs on the rank's own samples."""

    def configure_phases(self):
        yield Phase("net", self.look, "net")
        yield Phase("late", self.play, "net", when=lambda: self.mean > 0)

    def look(self, batch):
        self.mean = batch["x"].mean().item()
        return self.play(batch)


class OfItsBatch(OnItsOwn):
    """It hangs on the samples of all ranks: each has kept its own in a hook, in a trial as one device too."""

    def on_train_batch_start(self, batch, *_):
        self.kept = batch["x"].mean()

    def configure_phases(self):
        yield Phase("net", self.look, "net")
        yield Phase("late", self.play, "net", when=lambda: all_ranks.mean(self.kept) > -0.5)


class Packs(One):
    """CTGAN: the network sees four samples as one row, and draws for each such pack."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 1))

    def play(self, batch):
        share = torch.rand(len(batch["x"]) // 4, 1, 1).repeat(1, 4, 6).view(-1, 6)
        return self.net((share * batch["x"]).view(-1, 24)).square().mean()


class PoolOfOwn(Plain):
    """As CycleGAN's published buffer. The first rank's rows are also the first ones that one device keeps."""

    def __init__(self):
        super().__init__()
        self.past = []

    def judge(self, batch):
        self.past.extend(self.fake(batch["x"]).detach())
        return super().judge({"x": batch["x"] if len(self.past) < 100 else torch.stack(self.past[:8])})


def test_an_iterator_in_a_module_that_no_code_names_is_left_alone(monkeypatch):
    """As what torch.optim has got: itertools.chain(generator.parameters(), encoder.parameters())."""
    head, game = ModuleType("head"), One()
    head.__file__, head.used_up, game.head = "head.py", chain([1]), head
    monkeypatch.setitem(sys.modules, "head", head)
    assert Reachable([game]).iterators() == []
    head.one = eval("lambda: next(used_up)", vars(head))
    assert Reachable([game]).iterators() == [("head.used_up", head.used_up)]
    names = {name for name, _ in Reachable([Idle()]).iterators()}
    assert names == {"head.weights", "__init__.numbers"}  # not what contextlib keeps


def test_a_trial_has_something_else_in_the_place_of_an_iterator_wherever_that_is():
    game, inside = One(), iter([1])
    game.kept, game.closed, game.own = {"deep": deque([chain([1])])}, lambda: inside, lambda: numbers
    game.trainer = mock.MagicMock(datamodule=None)

    def held():
        return [game.kept["deep"][0], game.closed(), game.own()]

    before, kept = held(), Snapshot(game, {})
    kept.take_places()
    assert all(isinstance(each, StandIn) for each in held())
    kept.put_back()
    assert held() == before


def test_packages_that_pip_has_put_beside_the_authors_are_not_searched(monkeypatch, tmp_path):
    """As --target does. Their folder is named otherwise than site-packages."""
    (tmp_path / "bought-1.0.dist-info").mkdir()
    (tmp_path / "bought-1.0.dist-info" / "RECORD").write_text("bought/__init__.py,sha256=1,2\nbought/deep.py,,\n")
    game, found = One(), {}
    for name in ("bought.deep", "own.deep"):
        found[name] = module = ModuleType(name)
        module.__file__, module.state = str(tmp_path / name.replace(".", "/")) + ".py", [0]
        monkeypatch.setitem(sys.modules, name, module)
    game.modules_of_others = [*found.values()]
    states = [value for _, value in Reachable([game]).objects.values()]
    assert [any(value is module.state for value in states) for module in found.values()] == [False, True]


def test_an_own_package_that_takes_long_to_look_through_is_named(monkeypatch):
    monkeypatch.setattr("strategies.check.snapshot.SLOW", 0)
    game, cloned = One(), ModuleType("cloned")
    game.trainer, cloned.__file__ = mock.MagicMock(datamodule=None), "cloned.py"
    game.cloned = cloned
    exec("".join(f"def f{number}(): pass\n" for number in range(99)), vars(cloned))
    monkeypatch.setitem(sys.modules, "cloned", cloned)
    with pytest.warns(UserWarning, match="most are of 'cloned'. If that is not your own code, pip install it"):
        Snapshot(game, {})


UNCHECKED = "nothing of this run is checked against one device, because a trial would move on the iterator"
ON_FEW = "no comparison with one device: step 1 was tried on 16 samples as one device with one rank, and a loss fails"
NO_ROOM = "the first step is not checked against one device, which may have no memory for 2"
BY_RANK = "phase 'late': in step 1 its `when` is True on the first rank, which decides, and False on others"


@pytest.mark.parametrize(
    ("game", "words", "unsaid", "how"),
    [
        row(WritesItsBatch, steps=3),
        row(Stateful, policy="zero3", check="often", steps=4),
        row(Reaching, policy="zero3", check="often", steps=5),
        row(Streams, f"{UNCHECKED} 'numbers'", steps=3),
        row(StreamsByTuple, f"{UNCHECKED} 'both.1'", steps=3),
        row(StreamsQuietly, f"{UNCHECKED} 'numbers'", steps=3),
        row(Plain, NO_ROOM, room=0),
        row(Remembers, ON_FEW, steps=4, policy="zero3"),
        row(FailsOnFew, "no comparison with one device: step 0 was tried on", steps=3, policy="fsdp", room=1),
        row(NanInTheFirst, "skipped the update", steps=2),
        row(VirtualBatches, unsaid=("no comparison",), steps=3),
        row(Packs, unsaid=("no comparison",), steps=4, slow=True),
        row(PoolOfOwn, "a loss keeps other values in 'past' than one device would", steps=2),
        row(Grows, steps=4),
        row(Scratch, unsaid=("buffer",), steps=3),
        row(Unsorted, "because its batch cannot be cut: the first samples: the batch has 8 samples", batches=unsorted),
        row(Coin, steps=6, batches=pairs),
    ],
)
def test_what_is_tried_trains_as_one_device(game, words, unsaid, how, ranks):
    alone = train(game, how.get("batches", vectors), steps=how.get("steps", 1), check=True)
    found = ranks(2).run(tried, game, **how)
    equals([trained for trained, _ in found], alone)
    assert says(found[0][1], words, unsaid), found[0][1]


@pytest.mark.parametrize(
    ("game", "words", "unsaid", "how"),
    [
        row(DrawingByTorch, "phase 'discriminator', 'generator': not compared with one device, because it draws other"),
        row(AsLongAsTheLongest, "samples of batch['x'] have another shape on another rank, as where a load", steps=2),
        row(OnItsOwn, BY_RANK, batches=halves, steps=3),
        row(OfItsBatch, unsaid=("its `when` is",), batches=halves, steps=3),
    ],
)
def test_what_is_not_compared_is_said(game, words, unsaid, how, ranks):
    trained, said = ranks(2).run(tried, game, **how)[0]
    assert trained is not None and says(said, words, unsaid), said


class TellsItsLogger(One):
    def play(self, batch):
        self.logger.log_metrics({"mine": 1.0}, self.step)
        return super().play(batch)


def told():
    logger, steps = DummyLogger(), []
    logger.log_metrics = lambda metrics, step=None: steps.append(step)
    train(TellsItsLogger, world=2, steps=3, check=True, logger=logger, log_every_n_steps=9)
    return steps


def test_a_logger_hears_nothing_of_a_trial(ranks):
    assert ranks(2).run(told)[0] == [0, 1, 2, 2]  # what the game tells, and at the end the losses


class Pairs(Plain):
    """Two loaders of pairs: two samples of each would look like two rows in each of two items."""

    def train_dataloader(self):
        data = TensorDataset(torch.ones(32, 6, dtype=torch.float64), torch.zeros(32, 6, dtype=torch.float64))
        return {name: GlobalLoader(data, 16) for name in ("one", "other")}

    def judge(self, batch):
        return super().judge({"x": batch["one"][0] + batch["other"][1]})

    def fool(self, batch):
        return super().fool({"x": batch["one"][0]})


class OfTwo(Plain):
    """Its batch comes from two loaders, of which one has two samples."""

    def train_dataloader(self):
        world = self.trainer.world_size
        return {name: parts(2, world, each) for name, each in (("many", vectors), ("few", two_alone))}

    def judge(self, batch):
        few = self.discriminator(batch["few"]["x"])
        return {**super().judge(batch["many"]), "few": few.square().mean()}

    def fool(self, batch):
        return super().fool(batch["many"])


class Ratio(Plain):
    """Two loaders with batches of unlike sizes: the first one's has a few rows, the other one's a single row a rank."""

    of_each = staticmethod(lambda judge, many, few: (judge(many), judge(few)))

    def __init__(self):
        super().__init__()
        self.discriminator.insert(1, nn.Dropout(0.5))

    def train_dataloader(self):
        data = torch.arange(192, dtype=torch.float64).view(32, 6).sin()
        return {name: GlobalLoader(TensorDataset(data), size) for name, size in (("many", 8), ("few", 2))}

    def judge(self, batch):
        many, few = self.of_each(self.discriminator, batch["many"][0], batch["few"][0])
        return (few - 1).square().mean() - many.mean()

    def fool(self, batch):
        return super().fool({"x": batch["many"][0]})


def joined(judge, many, few):
    return judge(torch.cat((many, few))).split((len(many), len(few)))


class JoinedRatio(Ratio):
    of_each = staticmethod(joined)


def two_alone(step):
    return {"x": vectors(step + 50)["x"][:2]}


def of_two_loaders(game, world):
    made, strategy = game(), PhaseStrategy("ddp")
    with warned() as said, mock.patch.dict(os.environ, PL_GLOBAL_SEED="11"):
        trainer(strategy, world, 2).fit(made)
    return snapshot(made, strategy), " ".join(said)


@pytest.mark.parametrize(
    ("game", "words", "unsaid"),
    [
        (Pairs, (), ("not checked",)),
        (OfTwo, ("one of its loaders gives each rank one sample",), ()),
        (Ratio, (), ("not checked",)),
    ],
)
def test_samples_of_two_loaders_are_not_taken_for_something_else(game, words, unsaid, ranks):
    (found, said), _ = ranks(2).run(of_two_loaders, game, 2)
    equals([found], of_two_loaders(game, 1)[0])
    assert says(said, words, unsaid)


class ConstantRatio(Ratio):
    """A constant of as many rows as another loader might have: it is joined as samples are."""

    def train_dataloader(self):
        loaders = super().train_dataloader()
        loaders["many"].collate_fn = lambda items: [torch.stack([x for (x,) in items]), torch.ones(16)]
        return loaders

    def judge(self, batch):
        return super().judge(batch) * batch["many"][1].sum()


def refused_of_two_loaders(game, words):
    with pytest.raises(UserError, match=rf"would not train as one device(?s:.*){words}"):
        of_two_loaders(game, 2)


@pytest.mark.parametrize(
    ("game", "words"),
    [
        (JoinedRatio, "give a network the samples of one of them"),
        (ConstantRatio, "all samples share, such as class weights, belongs into an attribute of the game"),
    ],
)
def test_samples_of_unlike_loaders_together_and_what_looks_like_samples_are_refused(game, words, ranks):
    ranks(2).run(refused_of_two_loaders, game, words)


class Lonely(One):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))

    def play(self, batch):
        return (self.gain * self.net(batch["x"])).square().mean()


def test_a_parameter_of_no_player_is_named_and_stays_as_it_is():
    with pytest.warns(UserWarning, match="'gain' is a parameter of no player, and never learns; put it into a player"):
        found = train(Lonely, steps=1)
    assert torch.equal(found["weight gain"], torch.ones(3).double())


# ---- ranks that fail in a trial ----


@pytest.fixture
def tries(monkeypatch):
    """Trials on the first of two ranks, which meet the other one if it has said that it comes: `store.add(...)`."""
    monkeypatch.setattr(one_device, "PATIENCE", 0.1)
    monkeypatch.setattr("strategies.check.trial.default_store", lambda: made.store)
    world = mock.Mock(size=2, rank=0, device=torch.device("cpu"), **{"gather.return_value": [("key", [])] * 2})
    training = mock.MagicMock(world=world, **{"game.step": 0})
    made = one_device.TrialRunner(training, mock.MagicMock(), mock.Mock())
    made.store, world.gather.return_value = torch.distributed.HashStore(), ["the same"] * 2
    return made


def test_a_rank_that_fails_alone_says_so_and_does_not_wait_for_the_others(tries, monkeypatch):
    """They wait for it in backward, say, so it must not wait for them in turn."""
    agree = mock.Mock(return_value=True)
    monkeypatch.setattr(trial, "agree", agree)
    tries.play.side_effect = ValueError("label 7 is not known")
    with pytest.raises(ValueError, match="label 7"):
        tries.run({"x": torch.zeros(2, 6)})
    assert not agree.called
    tries.store.add("trial key/2/1", 1)  # the control: the other rank comes
    with pytest.raises(one_device.TooFew, match="label 7"):
        tries.run({"x": torch.zeros(2, 6)})


def test_a_rank_that_alone_asks_an_iterator_is_refused(tries, monkeypatch):
    monkeypatch.setattr(trial, "agree", mock.Mock(return_value=True))
    tries.play.side_effect = MovesOn("pictures")
    with pytest.raises(UserError, match=r"the iterator 'pictures', .* As not all ranks do so, nothing can be tried"):
        tries.run({"x": torch.zeros(2, 6)})
    tries.store.add("trial key/2/1", 1)
    with pytest.raises(MovesOn):
        tries.run({"x": torch.zeros(2, 6)})


def test_a_rank_whose_connection_breaks_does_not_wait_at_all(tries):
    """Another rank has refused the game, and is gone."""
    tries.play.side_effect = RuntimeError("[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:1.")
    tries.store = mock.Mock(add=mock.Mock(side_effect=AssertionError("it waits")))
    with pytest.raises(RuntimeError, match="Connection closed"):
        tries.run({"x": torch.zeros(2, 6)})


# ---- what is said of draws; that they are those of one device: tests/scenes/draws.py ----


class OneSample(Plain):
    """A draw of a fixed shape, where a rank has one sample."""

    def fake(self, real):
        return super().fake(real) * torch.randn(512, dtype=real.dtype)[:6] + torch.randn(len(real), 6).to(real)


def two(step):
    return {"x": torch.arange(12.0, dtype=torch.float64).view(2, 6) / 10 + step}


def lines_of(*args, **kwargs):
    """The lines about draws, with the weights."""
    with mock.patch("strategies.private.say") as info:
        found = train(*args, **kwargs)
    return [call.args[0] for call in info.call_args_list], found


def test_a_fixed_shape_is_one_draw_where_a_rank_has_one_sample(ranks):
    alone = train(OneSample, two, policy="single")
    (lines, found), (others, _) = ranks(2).run(lines_of, OneSample, two, world=2, check=True)
    equals([found], alone)
    words = "draws [512] once for the whole batch (normal_), [1, 6] for each sample (normal_)"
    assert lines == [f"phase 'discriminator' {words}", f"phase 'generator' {words}"] and others == []
    assert lines_of(OneSample, two, policy="single")[0] == []
