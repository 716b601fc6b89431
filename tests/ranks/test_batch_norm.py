"""Batch norms of an author's own: over all samples, or over groups, at any number of ranks and under every policy."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import batch_norm

from nets.norm import in_groups
from tests.support.hard_games import Plain
from tests.support.parity import BROKEN, distance, equals, often, refused, train

POLICIES = ["ddp", "zero3", "zero2", "ddp+recompute", "fsdp", "generator=pipeline,*=ddp"]


class Gained(nn.BatchNorm1d):
    def forward(self, x):
        return 3 * super().forward(x)


class Conditional(nn.BatchNorm1d):
    """BigGAN's: its gain and bias are arguments."""

    def forward(self, x, gain=None, bias=None):
        return super().forward(x) * (1 + gain) + bias


class Stored(nn.Module):
    """A module that calls torch's function itself."""

    def __init__(self):
        super().__init__()
        self.register_buffer("stored_mean", torch.zeros(8))
        self.register_buffer("stored_var", torch.ones(8))

    def forward(self, x):
        return F.batch_norm(x, self.stored_mean, self.stored_var, None, None, self.training, 0.1, 1e-4)


class Ghost(nn.BatchNorm1d):
    """Statistics of every second sample."""

    def forward(self, x):
        given = [each.repeat(2) for each in (self.running_mean, self.running_var, self.weight, self.bias)]
        y = F.batch_norm(x.view(-1, 16), *given, self.training, self.momentum, self.eps).view_as(x)
        with torch.no_grad():
            for ours, both in zip((self.running_mean, self.running_var), given, strict=False):
                ours.copy_(both.view(2, 8).mean(0))
        return y


class AdaptiveInstanceNorm(nn.Module):
    """MUNIT's: samples are laid beside each other, as channels of one row."""

    def forward(self, x, gain):
        pixels, weight = x.view(1, -1, 4), gain.reshape(-1)
        return F.batch_norm(pixels, torch.zeros_like(weight), torch.ones_like(weight), weight, None, True).view_as(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.line, self.gain, self.norm = nn.Linear(8, 8, bias=False), nn.Linear(8, 8), Conditional(8, affine=False)
        self.stored, self.adaptive = Stored(), AdaptiveInstanceNorm()

    def forward(self, x):
        gain = self.gain(x)
        x = self.stored(torch.tanh(self.norm(self.line(x), gain=gain, bias=x)))
        return self.adaptive(x, gain[:, :2])


class Own(Plain):
    """Own subclasses and own modules."""

    def __init__(self):
        super().__init__()
        first = nn.Linear(4, 8, bias=False), Gained(8), nn.Tanh()
        self.generator = nn.Sequential(*first, Block(), nn.Linear(8, 6, bias=False))
        line = nn.Linear(6, 8, bias=False)
        self.discriminator = nn.Sequential(line, Gained(8, momentum=None), nn.Tanh(), Ghost(8), nn.Linear(8, 1))


class Grouped(Plain):
    """Statistics of four neighbouring samples."""

    micro_batches = 2

    def __init__(self, size=4):
        super().__init__()
        line = nn.Linear(4, 8, bias=False)
        norm = in_groups(nn.BatchNorm1d(8), size)
        self.generator = nn.Sequential(line, norm, nn.Tanh(), nn.Linear(8, 6))


alone = pytest.fixture(scope="module")(lambda: {game: train(game, policy="single") for game in (Own, Grouped)})


@pytest.mark.promise("a batch norm with a forward of its own", "the training of one device, or a refusal by name")
@pytest.mark.parametrize("policy", often(POLICIES))
@pytest.mark.parametrize("game", [Own, Grouped])
def test_the_training_is_that_of_one_device(game, policy, ranks, alone):
    equals(ranks(2).run(train, game, policy=policy, world=2, check=policy == "ddp"), alone[game])


def test_on_one_device_torchs_own_function_trains(alone):
    before = F.batch_norm
    assert distance(train(Own, policy="ddp", sync_batchnorm=False), alone[Own]) == 0
    assert F.batch_norm is before


@pytest.mark.promise("a batch norm with a forward of its own")
def test_the_control_that_is_not_synchronised_differs(ranks, alone):
    assert distance(ranks(2).run(train, Own, world=2, sync_batchnorm=False)[0], alone[Own]) > BROKEN


def test_the_control_of_groups_over_all_samples_differs(ranks, alone):
    assert distance(ranks(2).run(train, partial(Grouped, 2), world=2)[0], alone[Grouped]) > BROKEN


def test_a_pipeline_sends_groups_through_in_one_chunk(ranks):
    for message in ranks(2).run(refused, Grouped, policy="generator=pipeline+chunks:2,*=ddp", world=2):
        assert "'1' looks at the whole batch, so a pipeline cannot cut it into 2 chunks" in message


def test_a_group_on_several_ranks_is_refused(ranks):
    for message in ranks(2).run(refused, partial(Grouped, 8), world=2):
        assert "batch norm in groups of 8 samples gets a tensor of shape (4, 8)" in message


class ByHand(Own):
    """Statistics by torch.mean, as BigGAN's manual_bn."""

    def __init__(self):
        super().__init__()
        self.generator.append(Centred())


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Imported(Own):
    """The function by another name, which is not replaced."""

    def __init__(self):
        super().__init__()
        self.generator.append(ByName())


class ByName(nn.Module):
    def forward(self, x):
        return batch_norm(x, None, None, training=True)


@pytest.mark.parametrize("game", [ByHand, Imported])
def test_what_cannot_be_synchronised_is_named_with_what_to_call(game, ranks):
    for message in ranks(2).run(refused, game, world=2, check=True):
        assert "2 ranks would not train as one device does" in message
        assert "a batch norm that is written by hand, or call F.batch_norm" in message
        assert "Synchronise batch norms" not in message
