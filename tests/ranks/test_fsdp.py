"""fsdp: FSDP2 stores and gathers blocks, and what it would not see is exact too."""

import copy
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning import Callback
from torch import nn
from torch.optim import Adam

from gan import GanModule, Phase, Player
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.policies.fsdp import Fsdp
from strategies.sharding.bucket import PendingReduction
from strategies.sharding.fsdp_bucket import FsdpBucket
from strategies.sharding.unshard_on_read import UnshardOnRead
from tests.support.hard_games import HARD, Plain
from tests.support.parity import BROKEN, distance, equals, often, parts, refused, single, train, trainer, vectors
from tests.support.watch import watched

WIDTH = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.gain = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(()))

    def forward(self, x):
        return x + self.gain * torch.tanh(self.norm(self.linear(x)))


class Network(nn.Module):
    """Weights outside of its blocks, of no dimension, of two blocks, and of another memory format."""

    def __init__(self):
        super().__init__()
        self.stem, self.blocks, self.head = (
            nn.Linear(6, WIDTH),
            nn.ModuleList(Block() for _ in range(4)),
            nn.Linear(8, 1),
        )
        self.picture = nn.Conv2d(1, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.blocks[3].linear.weight = self.blocks[0].linear.weight

    def forward(self, x):
        return self.head(self.features(x))

    def features(self, x):
        x = self.stem(x)
        x = x + self.picture(x.view(-1, 1, 2, 4)).mean(1).reshape(-1, WIDTH)
        for block in self.blocks:
            x = block(x)
        return x @ self.blocks[1].linear.weight  # after the block's own call


class Odd(GanModule):
    """Networks that are called, read past their calls, and differentiated twice; a graph that two phases use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.maker, self.judge, self.teacher = Network(), Network(), Network()

    def configure_players(self):
        adam = partial(Adam, lr=1e-2)
        yield Player("maker", self.maker, adam, ema=0.8)
        yield Player("judge", self.judge, adam, clip=0.5)
        yield Player("teacher", self.teacher)

    def configure_phases(self):
        yield Phase("judge", self.judged, "judge", micro_batches=2)
        yield Phase("penalty", self.penalty, "judge", second_order=True)
        yield Phase("maker", self.made, "maker", micro_batches=2)

    def fake(self, batch):
        return self.maker.features(batch["x"])[:, :6]

    def judged(self, batch):
        fake = self.shared("fake", self.fake, batch).detach()
        decay = self.judge.blocks[2].linear.weight.square().mean() + self.judge.head.weight.square().mean()
        return {"score": (self.judge(fake) - self.judge(batch["x"])).mean(), "decay": 1e-2 * decay}

    def penalty(self, batch):
        x = batch["x"].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.judge(x).sum(), x, create_graph=True)
        return slope.square().mean()

    def made(self, batch):
        fake = self.shared("fake", self.fake, batch)
        near = (self.teacher.features(fake) - self.teacher.features(batch["x"])).square().mean()
        return -self.judge(fake).mean() + near + self.maker(batch["x"]).square().mean()


STEPS = 4  # of three phases that cut the batch and differentiate twice


@pytest.fixture(scope="module")
def alone():
    return train(Odd, policy="single", steps=STEPS)


@pytest.mark.parametrize(
    ("policy", "world"),
    often(
        [
            ("fsdp", 2),
            pytest.param("fsdp", 4, marks=pytest.mark.slow),
            ("fsdp+whole", 2),
            ("fsdp+offload", 2),
            ("fsdp+recompute", 2),
            ("fsdp+hybrid:2", 4),
            ("maker=fsdp,*=zero3", 2),
            ("judge=fsdp+whole,*=ddp", 2),
        ],
        ["fsdp"],
    ),
)
def test_it_trains_as_one_device(policy, world, ranks, alone):
    equals(ranks(world).run(train, Odd, policy=policy, world=world, steps=STEPS, check=True), alone)


class Stale(Fsdp):
    """Goes on with the weights that it gathered first."""

    name = "stale"

    def make_storage(self):
        storage = super().make_storage()
        storage.shards_changed = storage.reshard = lambda: None
        for bucket in storage.buckets:
            bucket.reshard = lambda: None
        return storage


class Unreduced(Fsdp):
    """Each rank's own gradients make its share."""

    name = "unreduced"

    def bucket(self, part):
        unit = super().bucket(part)
        unit.reduce_scatter = lambda: Local(unit)
        return unit


class Local(PendingReduction):
    """In place of a reduce-scatter."""

    def __init__(self, bucket):
        own = bucket.joined({name: each.grad for name, each in bucket.weights.items() if each.grad is not None})
        self.bucket, self.flat, self.shard = bucket, None, own[bucket.first : bucket.first + bucket.length]


@pytest.mark.parametrize("broken", often([Stale, Unreduced], [Stale]))
def test_the_control_without_one_collective_differs(broken, ranks, alone):
    assert distance(ranks(2).run(train, Odd, policy=broken, world=2, steps=STEPS)[0], alone) > BROKEN


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


class Named(Odd):
    def configure_players(self):
        maker, judge, teacher = super().configure_players()
        yield from (maker, Player("judge", judge.module, judge.optimizer, blocks=["blocks.1", "head"]), teacher)


def test_a_player_may_name_its_blocks(ranks):
    root, one, head = ranks(2).run(look, units_of, Named)[0]
    assert (one[0].rpartition(".")[0], head) == ("blocks.1", ["head.bias", "head.weight"])
    assert "blocks.2.gain" in root


class Led(Named):
    """A player that follows another one, and names no blocks of its own."""

    def __init__(self):
        super().__init__()
        self.led = Network()

    def configure_players(self):
        yield from super().configure_players()
        yield Player("led", self.led, follows="judge", ema=0.9)

    def configure_phases(self):
        yield Phase("judge", lambda batch: (self.judge(batch["x"]) - self.led(batch["x"]) - 1).square().mean(), "judge")


def test_a_player_that_follows_has_the_blocks_of_the_followed(ranks):
    equals(ranks(2).run(train, Led, policy="fsdp", world=2), train(Led, policy="single"))


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


class Chosen(Odd):
    """Ranks call blocks in orders of their own."""

    def configure_phases(self):
        yield Phase("judge", self.chosen, "judge")

    def chosen(self, batch):
        x = self.judge.stem(batch["x"])
        for number in (0, 1) if dist.get_rank() == 0 else (1, 0):  # of different sizes
            x = self.judge.blocks[number](x)
        return x.square().mean()


def test_ranks_that_read_other_weights_are_told(ranks):
    for message in ranks(2).run(refused, Chosen, policy="fsdp", world=2, steps=1):
        assert "phase 'judge' read weights in another order on another rank" in message
        assert "type fsdp+whole, which gathers a player once a phase" in message
    assert ranks(2).run(refused, Chosen, policy="fsdp+whole", world=2, steps=1) == [None, None]


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


class FewerBlocks(Chosen):
    def chosen(self, batch):
        x = self.judge.stem(batch["x"])
        for number in (1, 2, 3) if dist.get_rank() == 0 else (1, 3):
            x = self.judge.blocks[number](x)
        return x.square().mean()


def numbered(step):
    return {**vectors(step), "number": torch.arange(len(vectors(step)["x"]))}


@pytest.mark.parametrize("game", [SomeBlocks, Hooked])
def test_a_block_that_one_rank_alone_reads_keeps_its_update(game, ranks):
    """With `whole` its gather is still on its way on the other rank when the shards are stepped."""
    found = ranks(2).run(train, game, numbered, "fsdp+whole", 2)
    equals(found, ranks(2).run(train, game, numbered, "ddp", 2)[0])


def test_a_rank_that_reads_fewer_weights_is_told_before_anybody_waits(ranks):
    for message in ranks(2).run(refused, FewerBlocks, policy="fsdp", world=2, steps=1):
        assert "phase 'judge' read weights in another order on another rank" in message


class Failing(Odd):
    def made(self, batch):
        super().made(batch)
        raise ValueError("in the middle")


class Reads(Callback):
    """Looks at weights when something has failed, as a callback that saves does."""

    def on_exception(self, trainer, game, exception):
        with mock.patch.object(FsdpBucket, "unshard") as one, mock.patch.object(FsdpBucket, "start_unshard") as other:
            list(game.parameters())
            with pytest.raises(UserError, match="is sharded"):
                game.state_dict()
        self.started = one.call_count + other.call_count


def read_after_a_failure():
    reads = Reads()
    with pytest.raises(ValueError, match="in the middle"):
        trainer(PhaseStrategy("fsdp", check=False), 2, 1, callbacks=[reads]).fit(Failing(), parts(1, 2))
    return reads.started


def test_after_a_failure_reading_waits_for_nobody(ranks):
    assert ranks(2).run(read_after_a_failure) == [0, 0]


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


class Listed(Plain):
    """A player without a forward of its own."""

    def configure_players(self):
        generator, judge = super().configure_players()
        yield Player("generator", nn.ModuleList([generator.module]), generator.optimizer)
        yield judge


def test_a_list_of_modules_is_a_player_too(ranks):
    equals(ranks(2).run(train, Listed, policy="fsdp", world=2), train(Listed, policy="single"))


class Overwriting(Odd):
    """As U-Nets and networks with activations before convolutions do."""

    def __init__(self):
        super().__init__()
        for block in self.judge.blocks:
            block.linear = nn.Sequential(nn.LeakyReLU(0.2, inplace=True), block.linear)

    def configure_phases(self):
        yield Phase("judge", self.overwrite, "judge")

    def overwrite(self, batch):
        x = self.judge.stem(batch["x"])
        for block in self.judge.blocks:
            x = block(x)
        return x.square().mean()


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


def test_a_block_may_overwrite_its_input(ranks):
    equals(ranks(2).run(train, Overwriting, policy="fsdp", world=2), train(Overwriting, policy="single"))


# ---- refusals ----


class Compiled(Plain):
    def __init__(self):
        super().__init__()
        self.generator.compile(backend="eager")


def test_a_network_that_the_game_compiles_is_refused(ranks):
    for message in ranks(2).run(refused, Compiled, policy="fsdp", world=2, steps=1):
        assert "player 'generator': the game compiles its network, and 'fsdp' must gather" in message


def test_one_process_is_one_device(hard_alone):
    assert distance(train(HARD["Plain"], policy="fsdp"), hard_alone("Plain")) == 0
