"""fsdp: FSDP2 shards and gathers, and what it does not see is exact too."""

import copy
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning import Callback
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.optim import Adam

from gan import GanModule, Phase, Player
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.policies.fsdp import Fsdp
from strategies.sharding.fsdp_units import FsdpWeight, Unit
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


@pytest.fixture(scope="module")
def alone():
    return train(Odd, policy="single")


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
    equals(ranks(world).run(train, Odd, policy=policy, world=world, check=True), alone)


class Stale(Fsdp):
    """Goes on with the weights that it gathered first."""

    name = "stale"

    def make_storage(self):
        storage = super().make_storage()
        storage.shards_changed = storage.reshard = lambda: None
        for unit in storage.units:
            unit.end_phase = lambda: None
        return storage

    def hold(self, phase):
        return self.storage.during(phase.name, whole=True, second_order=False, at_start=True)


class Unreduced(Fsdp):
    """Each rank's own gradients make its share."""

    name = "unreduced"

    def make_reduction(self):
        for unit in self.storage.units:
            unit.group._reduce_scatter_comm = Local()
        return super().make_reduction()


class Local:
    """In place of a reduce-scatter."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        own = input_tensor.view(group.size(), -1)[group.rank()]
        output_tensor.copy_(own * group.size() if op == dist.ReduceOp.SUM else own)  # as if all ranks had the same


@pytest.mark.parametrize("broken", often([Stale, Unreduced], [Stale]))
def test_the_control_without_one_collective_differs(broken, ranks, alone):
    assert distance(ranks(2).run(train, Odd, policy=broken, world=2)[0], alone) > BROKEN


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


def look(function, game=Odd, policy="fsdp", steps=2):
    callback = AtEnd(function)
    trainer(PhaseStrategy(policy), 2, steps, callbacks=[callback]).fit(game(), parts(steps, 2))
    return callback.seen


def units_of(strategy, _):
    return [sorted(unit.everything) for unit in strategy.policies["judge"].storage.units]


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


def collectives(policy, steps=3):
    *_, trace = watched(Once, policy, 2, steps)[-1]
    kinds = {"_allgather_base_": "gather", "_reduce_scatter_base_": "reduce"}
    return [kinds[name] for name, _ in trace.collectives if name in kinds]


def test_a_phase_gathers_for_forward_and_backward_and_reduces_once(ranks):
    """The root's unit stays whole in between, and a unit that nobody reads is not gathered, but reduced with zeros."""
    found = ranks(2).run(collectives, "fsdp")[0]
    assert found.count("reduce") == 1 + 4
    assert found.count("gather") == 1 + 3 + 3
    assert found.index("reduce") < len(found) - found[::-1].index("gather")  # reduced while backward gathers on
    whole = ranks(2).run(collectives, "fsdp+whole")[0]
    assert whole.count("gather") == whole.count("reduce") == 1 + 4


class Peak(Callback):
    """How many units of the judge were whole at once in the last step."""

    units, most = (), 0

    def on_train_batch_start(self, trainer, *_):
        self.units, self.most = trainer.strategy.policies["judge"].storage.units, 0

    def on_train_batch_end(self, *_):
        self.units = ()

    def count(self):
        self.most = max(self.most, sum(unit.unsharded for unit in self.units))


def peak(policy):
    watch, use = Peak(), FsdpWeight.use

    def uses(part, whole):
        use(part, whole)
        watch.count()

    with mock.patch.object(FsdpWeight, "use", uses):
        trainer(PhaseStrategy(policy, check=False), 2, 2, callbacks=[watch]).fit(Once(), parts(2, 2))
    return watch.most


def test_a_player_is_never_whole_while_a_phase_reads_it(ranks):
    assert ranks(2).run(peak, "fsdp") == [2, 2]  # the root's, and one block's
    assert ranks(2).run(peak, "fsdp+whole") == [4, 4]  # beside the one that nobody reads


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
        with mock.patch.object(Unit, "unshard") as one, mock.patch.object(Unit, "start_unshard") as other:
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
    trainer(PhaseStrategy("fsdp"), 2, 2, callbacks=[callback]).fit(game, parts(2, 2))
    same, kinds, there = callback.seen
    assert same
    assert kinds == [type(module).__name__ for module in fresh.judge.modules()]
    assert there == attributes(fresh.judge) == attributes(game.judge)
    assert not any(module in _module_state_mapping for module in game.modules())
    hooks = [name for name in vars(game) if name.endswith("_hooks")]
    before = [[len(getattr(module, name)) for name in hooks] for module in fresh.judge.modules()]
    assert [[len(getattr(module, name)) for name in hooks] for module in game.judge.modules()] == before


def test_modules_stay_what_they_are(ranks):
    ranks(2).run(conduct_and_after)


class OnlyForward(Odd):
    """Nobody differentiates through the maker in the last phase, so FSDP2 does not clear what it notes of it."""

    def configure_phases(self):
        yield from super().configure_phases()
        yield Phase("last", lambda batch: self.judge(self.fake(batch).detach()).mean(), "judge")


def iteration_state(strategy, _):
    storage = strategy.policies["maker"].storage
    context = storage.units[0].group.comm_ctx
    return len(context.post_forward_order), sum(unit.running for unit in storage.units), storage.unsharded


def iteration_state_unless(cleared):
    with nullcontext() if cleared else mock.patch.object(Unit, "end_phase", Unit.reshard):
        return look(iteration_state, OnlyForward)


@pytest.mark.slow
def test_nothing_adds_up_from_phase_to_phase(ranks):
    assert ranks(2).run(iteration_state_unless, True) == [(0, 0, False)] * 2
    assert ranks(2).run(iteration_state_unless, False)[0][0] > 0


class Listed(Plain):
    """A player without a forward of its own."""

    def configure_players(self):
        generator, judge = super().configure_players()
        yield Player("generator", nn.ModuleList([generator.module]), generator.optimizer)
        yield judge


def test_a_list_of_modules_is_a_player_too(ranks):
    equals(ranks(2).run(train, Listed, policy="fsdp", world=2), train(Listed, policy="single"))


# ---- refusals ----


class TwoKinds(Plain):
    def __init__(self):
        super().__init__()
        self.generator[0].double()


def test_weights_of_two_kinds_are_refused(ranks):
    for message in ranks(2).run(refused, TwoKinds, single, "fsdp", 2, steps=1, precision="32-true"):
        assert "player 'generator': its weights are float32 and float64, and FSDP2 gathers one kind" in message
        assert "type --strategy generator=zero3,*=fsdp" in message


class Compiled(Plain):
    def __init__(self):
        super().__init__()
        self.generator.compile(backend="eager")


def test_a_network_that_the_game_compiles_is_refused(ranks):
    for message in ranks(2).run(refused, Compiled, policy="fsdp", world=2, steps=1):
        assert "player 'generator': the game compiles its network, and 'fsdp' must gather" in message


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


def test_a_block_that_overwrites_its_input_is_refused_by_name(ranks):
    for message in ranks(2).run(refused, Overwriting, policy="fsdp", world=2, steps=1):
        assert message.startswith("phase 'judge': a block of a network under fsdp begins by writing in place into its ")
        assert "give it inplace=False, or use zero3, not fsdp" in message
    assert ranks(2).run(refused, Overwriting, policy="zero3", world=2, steps=1) == [None, None]


def test_one_process_is_one_device(hard_alone):
    assert distance(train(HARD["Plain"], policy="fsdp"), hard_alone("Plain")) == 0
