"""Losses over the global batch: `gan.ranks` in losses and modules gives one device's training, micro-batches too."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize, softplus

from gan import Phase, noise, ranks
from nets.stylegan_layers import MinibatchDeviation
from strategies.micro_batches import deal_batch
from tests.support.hard_games import BatchNorms, Plain
from tests.support.parity import BROKEN, distance, equals, train


class Codes(nn.Module):
    """The nearest of four codes, which follow their inputs by a moving average (van den Oord et al. 2017)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(4, 6))
        self.register_buffer("sizes", torch.ones(4))

    def forward(self, x):
        with torch.no_grad():
            nearest = nn.functional.one_hot(torch.cdist(x, self.codes).argmin(1), 4)
            self.sizes.lerp_(ranks.sum(nearest.sum(0)).to(x), 0.1)
            self.codes.lerp_(ranks.sum(nearest.to(x).T @ x) / self.sizes.clamp_min(0.1)[:, None], 0.1)
            code = nearest.to(x) @ self.codes
        return x + (code - x).detach()


class Contrast(Plain):
    """Losses that are no mean over samples, each written as for one device."""

    def __init__(self):
        super().__init__()
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), MinibatchDeviation(), nn.Linear(9, 3))
        self.codes = Codes()

    def configure_phases(self):
        micro = {"micro_batches": self.micro_batches}
        yield Phase("discriminator", self.judge, "discriminator", **micro)
        yield Phase("generator", self.fool, "generator", second_order=True, **micro)

    def judge(self, batch):
        real, fake = self.discriminator(self.codes(batch["x"])), self.discriminator(self.fake(batch["x"]).detach())
        # The relativistic average of Jolicoeur-Martineau 2018.
        real_mean, fake_mean = (ranks.mean(score.mean()) for score in (real, fake))
        return {
            "relative": (softplus(fake_mean - real) + softplus(fake - real_mean)).mean(),
            "root": ranks.mean(real.square().mean()).sqrt(),
        }

    def fool(self, batch):
        fake = self.fake(batch["x"])
        ours, theirs = normalize(self.discriminator(fake)), normalize(self.discriminator(batch["x"]))
        # InfoNCE of van den Oord et al. 2018.
        keys, own = ranks.gather(theirs, own=True)
        contrast = cross_entropy(ours @ keys.T / 0.5, torch.arange(len(keys))[own])
        error = (fake - batch["x"]).square().mean()
        # The adaptive weight of VQGAN, Esser et al. 2021: a ratio of the norms of gradients.
        last = self.generator[-1].weight
        sizes = [ranks.mean(torch.autograd.grad(each, last, retain_graph=True)[0]).norm() for each in (error, contrast)]
        return {"error": error, "contrast": (sizes[0] / sizes[1]).detach() * contrast}


class ContrastInTwo(Contrast):
    micro_batches = 2


GAMES = [Contrast, ContrastInTwo]
alone = pytest.fixture(scope="module")(lambda: {game: train(game, policy="single") for game in GAMES})


@pytest.mark.parametrize(
    ("game", "policy", "world"),
    [
        *((Contrast, policy, 2) for policy in ("ddp", "ddp+recompute", "zero3")),  # the matrix has the rest
        *((ContrastInTwo, policy, 2) for policy in ("ddp", "zero3")),
        *(
            pytest.param(ContrastInTwo, *each, marks=pytest.mark.slow)
            for each in (("zero2", 2), ("ddp", 4), ("zero3", 4))
        ),
    ],
)
def test_losses_over_the_global_batch_are_those_of_one_device(game, policy, world, ranks, alone):
    equals(ranks(world).run(train, game, policy=policy, world=world), alone[game])


def without(name, **kwargs):
    """Each rank takes its own values for those of all."""
    with mock.patch.object(ranks, name, lambda values, own=False: (values, slice(0, len(values))) if own else values):
        return train(Contrast, policy="ddp", world=2, **kwargs)


@pytest.mark.parametrize("name", ["sum", "mean", "gather"])
def test_the_control_without_the_other_ranks_differs(name, ranks, alone):
    found = ranks(2).run(without, name)[0]
    assert distance(found, alone[Contrast]) > BROKEN


# ---- micro-batches ----


class MicroBatchNorms(BatchNorms):
    """The noise of a micro-batch, its batch norm and its loss are those of one set of samples."""

    micro_batches = 2

    def fool(self, batch):
        fake = self.fake(batch["x"])
        every = ranks.gather(fake)
        return super().fool(batch) + cross_entropy(every @ ranks.gather(batch["x"]).T, torch.arange(len(every)))


def chunks(batch, total, parts, phase):
    """A control: micro-batches of neighbouring rows."""
    return [deal_batch(batch, part, parts) for part in range(parts)]


def place_in_chunks(phase, counts, index, step, training):
    parts = phase.micro_batches
    rows, key = counts[0] // parts, (training.seed, step, phase.name)
    return noise.Place(key, (training.world.rank * parts + index) * rows, rows, training.world.size * parts * rows)


def in_chunks(**kwargs):
    with mock.patch.multiple("strategies.turn", split_batch=chunks, _place=place_in_chunks):
        return train(MicroBatchNorms, **kwargs)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_micro_batch_is_the_same_set_of_samples_at_any_number_of_ranks(world, ranks):
    expected = train(MicroBatchNorms, policy="single")
    equals(ranks(world).run(train, MicroBatchNorms, world=world), expected)
    # The control, in which all but the cut is the same.
    found = ranks(world).run(partial(in_chunks, policy="ddp", world=world))[0]
    assert distance(found, in_chunks(policy="single")) > BROKEN
