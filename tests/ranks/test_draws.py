"""What published networks draw by torch's own functions, NumPy and random: the training of one device."""

import random
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gan import Phase
from tests.support.hard_games import Plain
from tests.support.parity import BROKEN, EXACT, distance, equals, often, refused, train

POLICIES = ["ddp", "zero1", "zero2", "zero3", "fsdp", "zero3+recompute"]


class Draws(Plain):
    """Draws as published networks do: for each sample, and once for all."""

    draws, micro_batches = "samples", 1

    def __init__(self):
        super().__init__()
        self.generator.insert(2, nn.Dropout(0.3))
        self.discriminator.insert(2, nn.Dropout(0.2))

    def configure_phases(self):
        more = {"micro_batches": self.micro_batches, "draws": self.draws}
        yield Phase("discriminator", self.judge, "discriminator", **more)
        yield Phase("generator", self.fool, "generator", **more)

    def fake(self, real):
        n, mean, double = len(real), real[:, :4].detach(), {"dtype": real.dtype}
        z = torch.randn(n, 4, **double) + torch.empty_like(mean).normal_() + torch.randn_like(mean)
        z = z + torch.rand([], **double) * torch.empty([], dtype=torch.int64).random_(1, 5)
        z = z[:, torch.randperm(4)] + torch.normal(mean, mean.abs()) * torch.bernoulli(mean.sigmoid())
        z = z + F.gumbel_softmax(mean) + F.one_hot(torch.multinomial(mean.exp(), 1)[:, 0], 4)
        z = z * torch.rand(2 * n, 4, **double).view(2, n, 4).sum(0) + torch.randn(7, **double).mean()
        start = (torch.rand(n, **double) * 3).long()
        z = (
            z + torch.poisson(mean.abs()) + real.gather(1, start[:, None] + torch.arange(4))
        )  # random segments, as HiFi-GAN and VITS cut them
        z = F.alpha_dropout(F.dropout2d(z[..., None, None], 0.3).flatten(1), 0.2, training=True)
        return F.dropout(self.generator(F.rrelu(z, training=True)), 0.1)


class Ambiguous(Draws):
    """8 numbers may be those of the 8 samples of a rank, which only a trial can tell."""

    def fake(self, real):
        return super().fake(real) * torch.randn(8, dtype=real.dtype)[:6]


class Recurrent(Draws):
    """Samples in the second dimension, and a generator of the author's."""

    def __init__(self):
        super().__init__()
        self.dice = torch.Generator().manual_seed(5)
        self.generator = nn.ModuleDict({"lstm": nn.LSTM(6, 6, 2, dropout=0.4), "last": nn.Linear(6, 6)})
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3).requires_grad_(False)

    def fake(self, real):
        noisy = torch.stack([real, real.roll(1, 1), torch.randn(real.shape, generator=self.dice, dtype=real.dtype)])
        return self.generator["last"](self.layer(self.generator["lstm"](noisy)[0])[-1])


class OfEachRank(Recurrent):
    """A generator that is seeded by the rank."""

    def __init__(self):
        super().__init__()
        self.dice.manual_seed(5 + torch.distributed.get_rank())


class SideBySide(Plain):
    """The heads of a sample lie side by side."""

    micro_batches = 1

    def __init__(self):
        super().__init__()
        self.generator = nn.MultiheadAttention(6, 2, 0.4)

    def configure_phases(self):
        yield Phase("discriminator", self.judge, "discriminator", micro_batches=self.micro_batches)
        yield Phase("generator", self.fool, "generator", micro_batches=self.micro_batches)

    def fake(self, real):
        return self.generator(*[torch.stack([real, real.roll(1, 1)])] * 3)[0][0]


class BothWays(SideBySide):
    """Also two rows for each sample, as torch.cat makes them: one of the two is taken for what it is not."""

    def fake(self, real):
        n, width = real.shape
        return super().fake(real) + torch.randn(2 * n, width, dtype=real.dtype).view(2, n, width).sum(0)


class SideBySideInParts(SideBySide):
    micro_batches = 2


class RecurrentInParts(Recurrent):
    micro_batches = 2


class OfNumPy(Draws):
    def fake(self, real):
        return super().fake(real) * np.random.rand() + random.random()


class InParts(Draws):
    micro_batches = 2


class ByTorch(Draws):
    """The control."""

    draws = "torch"


class Again(Draws):
    """The author's own checkpoint, which runs the networks again in backward."""

    reentrant, preserve = False, True

    def fake(self, real):
        again = partial(checkpoint, use_reentrant=self.reentrant, preserve_rng_state=self.preserve)
        return again(super().fake, real.detach().requires_grad_())


class Reentrant(Again):
    reentrant = True


class Forgetful(Again):
    """The control: the second forward does not begin in the first one's random state."""

    preserve = False


def seeded(game, **kwargs):
    """Ranks whose NumPy and Python begin otherwise."""
    rank = torch.distributed.get_rank() if kwargs.get("world", 1) > 1 else 0
    np.random.seed(3 + rank)
    random.seed(3 + rank)
    torch.manual_seed(3 + rank)
    return train(game, **kwargs)


@pytest.fixture(scope="module")
def alone():
    return train(Draws, policy="single")


@pytest.mark.promise("torch's own noise or dropout in a loss", "the training of one device, or a refusal by name")
@pytest.mark.parametrize("policy", often(POLICIES))
def test_draws_of_networks_are_those_of_one_device(policy, ranks, alone):
    equals(ranks(2).run(train, Draws, policy=policy, world=2, check=True), alone)


def test_so_they_are_on_four_ranks(ranks, alone):
    equals(ranks(4).run(train, Draws, world=4, check=True), alone)


def test_a_trial_tells_whose_rows_they_are(ranks):
    alone = train(Ambiguous, policy="single")
    equals(ranks(2).run(train, Ambiguous, world=2, check=True), alone)
    control = ranks(2).run(train, Ambiguous, world=2)
    assert distance(control[0], alone) > BROKEN


def test_so_they_are_in_micro_batches(ranks, alone):
    assert distance(train(InParts, policy="single"), alone) < EXACT
    equals(ranks(2).run(train, InParts, world=2, check=True), alone)


def test_samples_in_the_second_dimension_and_the_authors_generator_are_followed(ranks):
    alone = train(Recurrent, policy="single")
    equals(ranks(2).run(train, Recurrent, world=2, check=True), alone)
    control = ranks(2).run(train, Recurrent, world=2)  # without a trial, which finds the dimension
    assert distance(control[0], alone) > BROKEN


def test_a_trial_tells_rows_side_by_side_from_copies(ranks):
    alone = train(SideBySide, policy="single")
    equals(ranks(2).run(train, SideBySide, world=2, check=True), alone)
    control = ranks(2).run(train, SideBySide, world=2)
    assert distance(control[0], alone) > BROKEN


@pytest.mark.parametrize(
    ("game", "typed"),
    [
        (OfEachRank, "seed the generator alike on all ranks"),
        (BothWays, "or all side by side"),
        (RecurrentInParts, "In micro-batches"),
        (SideBySideInParts, "In micro-batches"),
    ],
)
def test_what_cannot_follow_is_refused_with_what_to_type(game, typed, ranks):
    for message in ranks(2).run(refused, game, world=2, check=True):
        assert "would not train as one device does" in message and typed in message


def test_numpy_and_python_draw_alike_on_all_ranks(ranks):
    equals(ranks(2).run(seeded, OfNumPy, world=2, check=True), seeded(OfNumPy, policy="single"))


@pytest.mark.promise("torch's own noise or dropout in a loss")
def test_the_control_by_torchs_generator_they_differ(ranks):
    found = ranks(2).run(seeded, ByTorch, world=2)
    assert distance(found[0], seeded(ByTorch, policy="single")) > BROKEN


def test_a_forward_that_the_author_runs_again_draws_the_same(ranks, alone):
    assert distance(train(Reentrant, policy="single"), alone) < EXACT
    assert distance(train(Again, policy="single"), alone) < EXACT
    equals(ranks(2).run(train, Again, world=2, check=True), alone)


def test_the_control_that_forgets_the_random_state_differs(alone):
    assert distance(train(Forgetful, policy="single"), alone) > BROKEN


class Compiled(Plain):
    """Dropouts in networks that the author compiles, or that the option does."""

    def __init__(self):
        super().__init__()
        self.generator.insert(2, nn.Dropout(0.3))

    def fake(self, real):
        return self.generator(torch.randn(len(real), 4, dtype=real.dtype))


class ByAuthor(Compiled):
    def __init__(self):
        super().__init__()
        self.generator.compile()


@pytest.mark.slow
def test_compiled_networks_draw_as_eager_ones(ranks):
    alone = train(Compiled, policy="single")
    assert distance(train(ByAuthor, policy="single"), alone) < EXACT
    equals(ranks(2).run(train, Compiled, policy="ddp+compile", world=2, check=True), alone)


# ---- what is said ----


class OneSample(Plain):
    """A draw of a fixed shape, where a rank has one sample."""

    def fake(self, real):
        return super().fake(real) * torch.randn(512, dtype=real.dtype)[:6] + torch.randn(len(real), 6).to(real)


def two(step):
    return {"x": torch.arange(12.0, dtype=torch.float64).view(2, 6) / 10 + step}


def said(*args, **kwargs):
    """The lines about draws, with the weights."""
    with mock.patch("strategies.private.say") as info:
        found = train(*args, **kwargs)
    return [call.args[0] for call in info.call_args_list], found


def test_a_fixed_shape_is_one_draw_where_a_rank_has_one_sample(ranks):
    alone = train(OneSample, two, policy="single")
    (lines, found), (others, _) = ranks(2).run(said, OneSample, two, world=2, check=True)
    assert distance(found, alone) < EXACT
    words = "draws [512] once for the whole batch (normal_), [1, 6] for each sample (normal_)"
    assert lines == [f"phase 'discriminator' {words}", f"phase 'generator' {words}"] and others == []
    assert said(OneSample, two, policy="single")[0] == []
