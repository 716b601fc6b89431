"""fsdp: FSDP2 stores and gathers blocks. tests/scenes/policies.py has that it trains as one device does."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
from lightning import Callback
from torch import nn
from torch.optim import Adam

from gan import GanModule, Phase, Player
from strategies import PhaseStrategy
from strategies.sharding.fsdp_bucket import FsdpBucket
from strategies.sharding.unshard_on_read import UnshardOnRead
from tests.scenes.policies import WIDTH, Block, Named, Odd
from tests.support.hard_games import HARD
from tests.support.parity import distance, equals, parts, single, train, trainer, vectors
from tests.support.watch import watched

# ---- units ----


class Once(Odd):
    """Blocks are called, and that is all."""

    def configure_phases(self):
        yield Phase("judge", lambda batch: through(self.judge, batch["x"]).mean(), "judge")


def through(network, x):
    for block in network.blocks[:3]:
        x = block(network.stem(x)) if block is network.blocks[0] else block(x)
    return x


class AtEnd(Callback):
    """Calls a function with the strategy and the game before the last step ends."""

    def __init__(self, look):
        self.look, self.seen = look, None

    def on_train_batch_end(self, trainer, game, *_):
        self.seen = self.look(trainer.strategy, game)


def look(function, game=Odd, policy="fsdp", steps=2, batches=vectors, **settings):
    callback = AtEnd(function)
    made = trainer(PhaseStrategy(policy, check=False), 2, steps, callbacks=[callback], **settings)
    made.fit(game(), parts(steps, 2, batches))
    return callback.seen


def units_of(strategy, _):
    return [sorted(unit.weights) for unit in strategy.policies["judge"].storage.buckets]


def test_blocks_are_units_and_the_root_has_the_rest(ranks):
    root, *blocks = ranks(2).run(look, units_of)[0]
    outside = {"stem.weight", "stem.bias", "head.weight", "head.bias", "picture.weight", "picture.bias"}
    assert set(root) == outside | {"blocks.0.linear.weight"}  # which is also the last block's
    own = ["gain", "linear.bias", "linear.weight", "norm.bias", "norm.weight"]
    expected = [[f"blocks.{number}.{name}" for name in own] for number in range(4)]
    expected[0].remove("blocks.0.linear.weight")
    expected[3].remove("blocks.3.linear.weight")
    assert blocks == expected


def test_a_player_may_name_its_blocks(ranks):
    root, one, head = ranks(2).run(look, units_of, Named)[0]
    assert (one[0].rpartition(".")[0], head) == ("blocks.1", ["head.bias", "head.weight"])
    assert "blocks.2.gain" in root


def collectives(policy, steps=3):
    *_, trace = watched(Once, policy, 2, steps)[-1]
    kinds = {"_allgather_base_": "gather", "_reduce_scatter_base_": "reduce"}
    return [kinds[name] for name, _ in trace.collectives if name in kinds]


def test_a_phase_gathers_for_forward_and_backward_and_reduces_once(ranks):
    """A unit that nobody reads is not gathered, but reduced with zeros. Backward begins with two that are there."""
    found = ranks(2).run(collectives, "fsdp")[0]
    assert found.count("reduce") == 1 + 4
    assert found.count("gather") == 1 + 3 + 3 - 1
    assert found.index("reduce") < len(found) - found[::-1].index("gather")  # reduced while backward gathers on
    whole = ranks(2).run(collectives, "fsdp+whole")[0]
    assert whole.count("gather") == whole.count("reduce") == 1 + 4


class Peak(Callback):
    """How many units of the judge were whole at once in the last step."""

    units, most = (), 0

    def on_train_batch_start(self, trainer, *_):
        self.units, self.most = trainer.strategy.policies["judge"].storage.buckets, 0

    def on_train_batch_end(self, *_):
        self.units = ()

    def count(self):
        self.most = max(self.most, sum(unit.unsharded for unit in self.units))


def peak(policy):
    watch, unshard = Peak(), FsdpBucket.unshard

    def unshards(unit, *args):
        unshard(unit, *args)
        watch.count()

    with mock.patch.object(FsdpBucket, "unshard", unshards):
        trainer(PhaseStrategy(policy, check=False), 2, 2, callbacks=[watch]).fit(Once(), parts(2, 2))
    return watch.most


def test_a_player_is_never_whole_while_a_phase_reads_it(ranks):
    assert ranks(2).run(peak, "fsdp") == [2, 2]  # the root's, and one block's
    assert ranks(2).run(peak, "fsdp+whole") == [5, 5]


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


class Mixtures(GanModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.judge = nn.Sequential(nn.Linear(6, WIDTH), *(Mixture() for _ in range(3)))

    def configure_players(self):
        yield Player("judge", self.judge, partial(Adam, lr=1e-3), blocks=["1", "2", "3"])

    def configure_phases(self):
        yield Phase("judge", lambda batch: self.judge(batch["x"]).square().mean(), "judge")


def recomputed():
    """The words of an error, if there is one."""
    try:
        return train(Mixtures, single, "fsdp+recompute", 2, steps=2, precision="32-true")
    except RuntimeError as error:
        return str(error)


def recomputed_without_care():
    with mock.patch.object(UnshardOnRead, "begin_again", lambda _: None):
        return recomputed()


def test_a_block_that_is_computed_again_keeps_all_of_its_units(ranks):
    alone = train(Mixtures, single, "single", steps=2, precision="32-true")
    assert distance(ranks(2).run(recomputed)[0], alone) < 1e-2  # bfloat16 rounds
    for message in ranks(2).run(recomputed_without_care):
        assert "storage" in message


# ---- ranks that differ ----


class SomeBlocks(Odd):
    """The samples of the first rank pass through one block more."""

    def configure_phases(self):
        yield Phase("judge", self.some, "judge")

    def some(self, batch):
        x = self.judge.stem(batch["x"])
        first = batch["number"][:, None] % len(batch["x"]) == batch["number"][:, None]  # of the first rank, or of all
        through = self.judge.blocks[1](x) if first.any() else x
        return torch.where(first, through, x).square().mean()


class Hooked(SomeBlocks):
    """A hook that wants whole gradients, before all ranks have waited for all gathers."""

    def on_before_optimizer_step(self, optimizer):
        self.seen = [weight.grad.norm() for weight in self.judge.parameters() if weight.grad is not None]


def numbered(step):
    return {**vectors(step), "number": torch.arange(len(vectors(step)["x"]))}


@pytest.mark.parametrize("game", [SomeBlocks, Hooked])
def test_a_block_that_one_rank_alone_reads_keeps_its_update(game, ranks):
    """With `whole` its gather is still on its way on the other rank when the shards are stepped."""
    found = ranks(2).run(train, game, numbered, "fsdp+whole", 2)
    equals(found, ranks(2).run(train, game, numbered, "ddp", 2)[0])


# ---- the author's network ----


def attributes(network):
    return {name: sorted(vars(module)) for name, module in network.named_modules()}


def conduct(strategy, game):
    with strategy.gathered():
        copied = copy.deepcopy(game.judge)
        numbers = game.judge.stem.weight.detach().numpy()  # a view, after which torch cannot resize the memory
        same = bool((copied.stem.weight.detach().numpy() == numbers).all())
    return same, [type(module).__name__ for module in game.judge.modules()], attributes(game.judge)


def conduct_and_after():
    game, fresh, callback = Odd(), Odd(), AtEnd(conduct)
    trainer(PhaseStrategy("fsdp", check=False), 2, 2, callbacks=[callback]).fit(game, parts(2, 2))
    same, kinds, there = callback.seen
    assert same
    assert kinds == [type(module).__name__ for module in fresh.judge.modules()]
    assert there == attributes(fresh.judge) == attributes(game.judge)
    hooks = [name for name in vars(game) if name.endswith("_hooks")]
    before = [[len(getattr(module, name)) for name in hooks] for module in fresh.judge.modules()]
    assert [[len(getattr(module, name)) for name in hooks] for module in game.judge.modules()] == before


def test_modules_stay_what_they_are(ranks):
    ranks(2).run(conduct_and_after)


class Doubled(Block):
    """A block whose norm has other numbers."""

    def forward(self, x):
        return x + self.gain * torch.tanh(self.norm(self.linear(x).double())).float()


class TwoKinds(Odd):
    def __init__(self):
        super().__init__()
        for number, block in enumerate(self.judge.blocks):
            self.judge.blocks[number] = doubled = Doubled()
            doubled.load_state_dict(block.state_dict())
            doubled.norm.double()

    def configure_phases(self):
        yield Phase("judge", lambda batch: self.judge(batch["x"]).square().mean(), "judge")


def test_a_block_may_have_weights_of_two_kinds(ranks):
    arguments = TwoKinds, single
    alone = train(*arguments, policy="single", precision="32-true")
    found = ranks(2).run(train, *arguments, policy="fsdp", world=2, precision="32-true")
    assert distance(found[0], alone) < 1e-6
    kinds = ranks(2).run(look, kinds_of, TwoKinds, precision="32-true", batches=single)[0]
    assert kinds.count("torch.float64") == 4


def kinds_of(strategy, _):
    return [str(unit.dtype) for unit in strategy.policies["judge"].storage.buckets]


def test_one_process_is_one_device(hard_alone):
    assert distance(train(HARD["Plain"], policy="fsdp"), hard_alone("Plain")) == 0
