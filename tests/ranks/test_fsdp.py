"""fsdp: FSDP2 stores and gathers blocks. tests/scenes/policies.py has that it trains as one device does."""

from functools import partial
from typing import ClassVar
from unittest import mock

import pytest
import torch
from lightning import Callback
from torch import nn
from torch.optim import Adam

from gan import Phase
from strategies.policies.fsdp import FsdpBucket
from tests.scenes.policies import WIDTH, Named, Odd
from tests.support.hard_games import One
from tests.support.parity import distance, parts, single, train, trainer
from tests.support.watch import WatchedStrategy, looked

# ---- units ----


class Once(Odd):
    def configure_phases(self):
        yield Phase("judge", lambda batch: through(self.judge, batch["x"]).mean(), "judge")


def through(network, x):
    for block in network.blocks[:3]:
        x = block(network.stem(x)) if block is network.blocks[0] else block(x)
    return x


def units_of(strategy, _):
    return [sorted(unit.weights) for unit in strategy.policies["judge"].storage.buckets]


def test_blocks_are_units_and_the_root_has_the_rest(ranks):
    root, *blocks = ranks(2).run(looked, units_of, Odd, "fsdp", 2)[0]
    outside = {"stem.weight", "stem.bias", "head.weight", "head.bias", "picture.weight", "picture.bias"}
    assert set(root) == outside | {"blocks.0.linear.weight"}  # which is also the last block's
    own = ["gain", "linear.bias", "linear.weight", "norm.bias", "norm.weight"]
    expected = [[f"blocks.{number}.{name}" for name in own] for number in range(4)]
    expected[0].remove("blocks.0.linear.weight")
    expected[3].remove("blocks.3.linear.weight")
    assert blocks == expected


def test_a_player_may_name_its_blocks(ranks):
    root, one, head = ranks(2).run(looked, units_of, Named, "fsdp", 2)[0]
    assert (one[0].rpartition(".")[0], head) == ("blocks.1", ["head.bias", "head.weight"])
    assert "blocks.2.gain" in root


class Peak(Callback):
    """How many units of the judge were whole at once in the last step."""

    units, most = (), 0

    def on_train_batch_start(self, trainer, *_):
        self.units, self.most = trainer.strategy.policies["judge"].storage.buckets, 0

    def on_train_batch_end(self, *_):
        self.units = ()

    def count(self):
        self.most = max(self.most, sum(unit.unsharded for unit in self.units))


def gathered(policy):
    """How many units were whole at once in the last step, and the order of its collectives."""
    watch, unshard, strategy = Peak(), FsdpBucket.unshard, WatchedStrategy(policy, check=False)

    def unshards(unit, *args):
        unshard(unit, *args)
        watch.count()

    with mock.patch.object(FsdpBucket, "unshard", unshards):
        trainer(strategy, 2, 2, callbacks=[watch]).fit(Once(), parts(2, 2))
    kinds = {"_allgather_base_": "gather", "_reduce_scatter_base_": "reduce"}
    return watch.most, [kinds[name] for name, _ in strategy.traces[-1][2].collectives if name in kinds]


def test_a_phase_gathers_for_forward_and_backward_and_a_player_is_never_whole(ranks):
    """A unit that nobody reads is not gathered, but reduced with zeros. Backward begins with two that are there."""
    (most, found), (others, _) = ranks(2).run(gathered, "fsdp")
    assert most == others == 2  # the root's, and one block's
    assert found.count("reduce") == 1 + 4
    assert found.count("gather") == 1 + 3 + 3 - 1
    assert found.index("reduce") < len(found) - found[::-1].index("gather")  # reduced while backward gathers on
    (most, whole), (others, _) = ranks(2).run(gathered, "fsdp+whole")
    assert most == others == 5
    assert whole.count("gather") == whole.count("reduce") == 1 + 4


class Mixture(nn.Module):
    """A block of many sub-modules, two of which have weights of other dtypes, so that it is several units."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.low, self.middle = nn.Linear(WIDTH, WIDTH).bfloat16(), nn.Linear(WIDTH, WIDTH)
        for layer in self.layers:
            layer.double()

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.double())).float()
            x = torch.tanh(self.middle(x)) + torch.tanh(self.low(x.bfloat16())).float()
        return x


class Mixtures(One):
    of_net: ClassVar = {"optimizer": partial(Adam, lr=1e-3), "blocks": ["1", "2", "3"]}

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, WIDTH), *(Mixture() for _ in range(3)))


@pytest.mark.slow
def test_a_block_that_is_computed_again_keeps_all_of_its_units(ranks):
    how = {"batches": single, "steps": 2, "precision": "32-true"}
    found = ranks(2).run(train, Mixtures, policy="fsdp+recompute", world=2, **how)
    assert distance(found[0], train(Mixtures, policy="single", **how)) < 1e-2  # bfloat16 rounds
