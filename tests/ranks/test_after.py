"""Player(after=...): what it writes to whole weights is kept, under every policy as in a loop by hand."""

from typing import ClassVar
from unittest import mock

import pytest
import torch
from torch import nn

from strategies.sharding.bucket import Bucket
from tests.support.duel import ENGINES, POLICIES, ByHand, Duel, fit, judge_network, of, played
from tests.support.parity import BROKEN, EXACT, distance, often


def with_constants() -> nn.Module:
    """A judge with a frozen weight and a buffer, which change by `rewrite` alone."""
    net = judge_network()
    net.offset = nn.Parameter(torch.linspace(0, 1, 8), requires_grad=False)
    net.register_buffer("scale", torch.ones(()))
    return net


def rewrite(net: nn.Module) -> None:
    """In the ways in which people do it: in place, by `data`, from the whole network's forward."""
    net["trunk"][0].weight.clamp_(-0.3, 0.3)
    net["head"].weight.data = net["head"].weight / net["head"].weight.norm()
    for weight in net["trunk"][2].parameters():
        weight.data.mul_(0.99)
    shown = net["head"](net["trunk"](torch.ones(1, 6, dtype=net.scale.dtype)))
    net["head"].bias.sub_(0.1 * shown[0])
    net.offset.mul_(0.9)
    net.scale.add_(0.05)


def to_unit_rows(net: nn.Module) -> None:
    for layer in (net[0], net[2]):
        layer.weight.copy_(nn.functional.normalize(layer.weight))


class After(Duel):
    of_judge: ClassVar = {"after": rewrite, "ema": 0.7}
    of_generator: ClassVar = {"after": to_unit_rows}

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.judge = with_constants()

    def score(self, x):
        return self.judge["head"](torch.tanh(self.judge["trunk"](x) * self.judge.scale + self.judge.offset))


class AfterByHand(ByHand):
    score = After.score

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.judge = with_constants().double()
        self.take({"generator": self.generator, "judge": self.judge})
        self.averages = {key: weight.detach().clone() for key, weight in self.judge.named_parameters()}
        del self.averages["offset"]

    def rewrite(self, name):
        (rewrite if name == "judge" else to_unit_rows)(self.networks[name])

    def updated(self, name):
        self.rewrite(name)
        if name == "judge":
            for key, average in self.averages.items():
                average.mul_(0.7).add_(self.judge.get_parameter(key), alpha=0.3)
                self.kept[f"ema judge.{key}"] = average


class Unchanged(AfterByHand):
    def rewrite(self, name):
        pass


@pytest.fixture(scope="module")
def by_hand():
    return AfterByHand().run()


OPTIONS = {"zero1+offload": 2, "zero2+hybrid:2": 4, "zero3+offload": 4}
WORLDS = often({**POLICIES, **OPTIONS, **ENGINES}.items())


@pytest.mark.parametrize(("policy", "world"), WORLDS)
def test_what_it_writes_is_kept(policy, world, ranks, by_hand):
    assert distance(of(played(ranks, After, policy, world), by_hand), by_hand) < EXACT


def test_it_is_kept_where_few_buckets_are_whole_for_the_phase(ranks, by_hand):
    assert distance(of(played(ranks, After, "zero3", 2, small=False), by_hand), by_hand) < EXACT


def forgetting(policy, world):
    with mock.patch.object(Bucket, "keep_writes", lambda self: None):
        return fit(After, policy, world)


@pytest.mark.slow
def test_the_controls_without_it_and_with_shards_that_do_not_take_it(ranks, by_hand):
    assert distance(Unchanged().run(), by_hand) > BROKEN
    for policy in ("zero1+offload", "zero3"):
        assert distance(of(ranks(2).run(forgetting, policy, 2)[0], by_hand), by_hand) > BROKEN


def test_it_runs_without_gradients_once_an_update_and_not_after_a_skipped_one():
    calls = []

    class Counting(Duel):
        of_judge: ClassVar = {"after": lambda net: calls.append(torch.is_grad_enabled())}

        def judging(self, batch):
            return super().judging(batch) * (float("nan") if self.step == 4 else 1.0)

    with pytest.warns(UserWarning, match="skipped the update of 'judge'"):
        fit(Counting, "single", 1, 6)
    assert calls == [False] * 7  # six steps, and two more turns, without step 4
