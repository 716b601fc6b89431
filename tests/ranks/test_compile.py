"""The option compile: the same training, with networks that torch.compile has compiled.

Compiled by the backend "aot_eager", which makes the graphs and their backwards and runs them as they are; by the one
that writes C++ in one test, where there is a C++ compiler.
"""

import re
import shutil
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

from gan import Player
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.options import compile as compiled
from strategies.options.compile import Compiled
from tests.ranks.test_games import GAMES, pictures
from tests.support.hard_games import HARD, Penalised, Plain, TwoForwards, TwoHeads, mlp
from tests.support.parity import EXACT, distance, equals, often, parts, refused, train, trainer, vectors
from tests.support.watch import moved

pytestmark = pytest.mark.skipif(compiled.FORGETFUL, reason="refused by name with this torch")


@pytest.fixture(autouse=True)
def graphs_alone():
    """No C++. Each training compiles anew: beside the graphs of another one, torch takes ten times as long."""
    torch._dynamo.reset()
    with mock.patch.object(compiled, "BACKEND", "aot_eager"):
        yield


def without_cpp(function, *args, **kwargs):
    """The same on a rank."""
    torch._dynamo.reset()
    with mock.patch.object(compiled, "BACKEND", "aot_eager"):
        return function(*args, **kwargs)


# ---- parity ----


class Rich(TwoForwards):
    """Spectral norm, dropout, and a gradient in a loss that leaves the graph for the backward to come."""

    def __init__(self):
        super().__init__()
        self.generator.insert(1, nn.Dropout(0.5))

    def fool(self, batch):
        loss = super().fool(batch)
        (slope,) = torch.autograd.grad(loss, self.generator[3].weight, retain_graph=True)
        return loss * (1 + slope.norm().detach())


class SharedPenalty(Penalised):
    """A score that was made in a phase of first order, differentiated twice in another."""

    def configure_phases(self):
        discriminator, generator = super().configure_phases()
        yield generator
        yield discriminator

    def score(self, x):
        return self.discriminator(x)

    def fool(self, batch):
        self.real = batch["x"].detach().requires_grad_()
        return super().fool(batch) + 0 * self.shared("score", self.score, self.real).mean().detach()

    def penalise(self, batch):
        score = self.shared("score", self.score, self.real)
        (slope,) = torch.autograd.grad(score.sum(), self.real, create_graph=True)
        return {**self.judge(batch), "r1": slope.square().sum(1).mean()}


GRAPHS = {game.__name__: (game, vectors, 4) for game in (Rich, SharedPenalty)}
GRAPHS |= {name: (HARD[name], vectors, 10) for name in ("BatchNorms", "SometimesReached", "TwoPhases", "Teacher")}
# StyleGAN2 has penalties in two phases, SEAN functions of its own. Two steps: every phase is due in the first.
GRAPHS |= {name: (GAMES[name], pictures, 2) for name in ("stylegan", "sean")}
TRIED = often([(name, "aot_eager") for name in GRAPHS], ["Rich"])
BY_INDUCTOR = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.mark.parametrize(
    ("name", "backend"), [*TRIED, pytest.param("Rich", "inductor", marks=[pytest.mark.slow, BY_INDUCTOR])]
)
def test_one_device_trains_the_same(name, backend):
    game, batches, steps = GRAPHS[name]
    with mock.patch.object(compiled, "BACKEND", backend):
        found = train(game, batches, "single+compile", steps=steps)
    assert distance(found, train(game, batches, "single", steps=steps)) < EXACT


@pytest.mark.slow
def test_the_same_bytes_are_moved(ranks):
    expected, found = (ranks(2).run(without_cpp, moved, Plain, each, 2, 2) for each in ("zero3", "zero3+compile"))
    assert [each[-2:] for each in found] == [each[-2:] for each in expected]  # both phases of the second step


# ---- what is compiled, and when ----


class Long(TwoForwards):
    """Validated with averages, every other batch shorter."""

    def validation_step(self, batch, batch_idx):
        self.generator(batch["x"][:, :4])


def graphs(game, policy, steps=6):
    """How many graphs have been compiled after every step."""
    torch._dynamo.reset()
    counters.clear()
    found = []
    counts = LambdaCallback(on_train_batch_end=lambda *_: found.append(counters["stats"]["unique_graphs"]))
    batches = [{"x": vectors(step)["x"][: 16 if step % 2 else 12]} for step in range(steps)]
    data = [DataLoader(batches, batch_size=None) for _ in range(2)]
    trainer(PhaseStrategy(policy), 1, steps, callbacks=[counts], val_check_interval=2).fit(game(), *data)
    return found


@pytest.mark.slow
def test_after_the_first_steps_nothing_is_compiled_any_more():
    found = graphs(Long, "single+compile")
    assert 0 < found[0] <= 7  # two players, with and without learning; and the machine is tried once
    assert found[-1] == found[3] <= 14


def test_in_a_phase_of_second_order_players_run_as_they_are_written():
    game, strategy = Penalised(), PhaseStrategy("single+compile")
    game.seen = []
    judge, fool = game.judge, game.fool
    game.judge = lambda batch: game.seen.append(called_compiled(game)) or judge(batch)
    game.fool = lambda batch: game.seen.append(called_compiled(game)) or fool(batch)
    trainer(strategy, 1, 2).fit(game, parts(2))
    assert game.seen == [(False, False), (True, True)] * 2


def called_compiled(game):
    return tuple(net._compiled_call_impl is not None for net in (game.generator, game.discriminator))


class Unsaid(Penalised):
    """A gradient penalty in a phase that does not speak of it."""

    def configure_phases(self):
        discriminator, generator = super().configure_phases()
        object.__setattr__(discriminator, "second_order", False)
        yield discriminator
        yield generator


def test_a_phase_that_does_not_say_second_order_is_told_to():
    trainer(PhaseStrategy("single"), 1, 1).fit(Unsaid(), parts(1))
    words = r"phase 'discriminator' differentiates a gradient.*\(generator, discriminator\); type .*second_order=True"
    with pytest.raises(UserError, match=words):
        trainer(PhaseStrategy("single+compile"), 1, 1).fit(Unsaid(), parts(1))


# ---- the author's modules stay what they are ----


def test_modules_stay_what_they_are_and_are_called_as_before():
    class Looking(Plain):
        def judge(self, batch):
            self.seen = list(self.state_dict()), [id(m) for m in self.modules()], called_compiled(self)
            return super().judge(batch)

    game = Looking()
    keys, modules = list(game.state_dict()), [id(m) for m in game.modules()]
    trainer(PhaseStrategy("single+compile"), 1, 1).fit(game, parts(1))
    assert game.seen == (keys, modules, (True, True))
    assert not any("_compiled_call_impl" in vars(module) for module in game.modules())


def test_what_an_author_has_compiled_stays_compiled():
    net = mlp(2, 2)
    net.compile(backend="eager")
    own = net._compiled_call_impl
    option = Compiled(Player("net", net), lambda: None)
    assert net._compiled_call_impl is not own
    option.release()
    assert net._compiled_call_impl is own


def test_of_a_network_without_a_forward_the_modules_inside_are_compiled():
    net = TwoHeads()
    Compiled(Player("net", net), lambda: None)
    assert net._compiled_call_impl is None
    assert all(part._compiled_call_impl is not None for part in (net.trunk, net.left, net.right))


# ---- refusals ----


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def score(self, x):
        return x @ self.weight


def test_a_network_without_any_forward_is_refused():
    words = r"player 'net': no module of its Bare has a forward to compile; leave the option out for it: --strategy "
    with pytest.raises(UserError, match=words):
        Compiled(Player("net", Bare()), lambda: None)


def broken(graph, inputs):
    raise RuntimeError("no compiler is to be found.\nAnd more.")


def test_a_network_that_cannot_be_compiled_is_named():
    with mock.patch.object(compiled, "BACKEND", broken):
        Compiled(Player("net", net := mlp(2, 2)), lambda: None)
        with pytest.raises(UserError, match=r"player 'net': torch.compile fails on its Sequential: .*no compiler is"):
            net(torch.ones(2))


def test_compile_and_recompute_exclude_each_other():
    said = refused(Plain, policy="single+compile+recompute", steps=1)
    assert "player 'generator': options compile and recompute exclude each other" in said
    assert "single+compile or single+recompute" in said


# ---- a torch.compile of the game's own ----


class Layers(nn.Sequential):
    """A class of one's own: before torch 2.15 `compile` leaves out torch's."""

    def forward(self, x):
        return super().forward(x)


class InPlace(Plain):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = Layers(*self.generator), Layers(*self.discriminator)
        for network in (self.generator, self.discriminator):
            network.compile(backend="aot_eager")


class Wrapped(Plain):
    def __init__(self):
        super().__init__()
        self.generator = torch.compile(self.generator, backend="aot_eager")


def plainly(found):
    return {name.replace("_orig_mod.", ""): value for name, value in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("game", [InPlace, Wrapped])
@pytest.mark.parametrize("policy", ["single", "ddp", "zero2"])
def test_the_games_own_compile_trains_the_same(policy, game, ranks, hard_alone):
    torch._dynamo.reset()
    counters.clear()
    found = [train(game, policy=policy)] if policy == "single" else ranks(2).run(train, game, policy=policy, world=2)
    equals([plainly(each) for each in found], hard_alone("Plain"))
    assert policy != "single" or counters["stats"]["unique_graphs"] > 0  # it ran compiled


@pytest.mark.parametrize("game", [InPlace, Wrapped])
def test_it_is_refused_where_weights_are_sharded(game, ranks):
    for said in ranks(2).run(refused, game, policy="zero3", world=2):
        assert "player 'generator': the game compiles its network, and 'zero3' must gather" in said
        assert "leave torch.compile out of the game and type --strategy generator=zero3+compile,*=zero3" in said


class AsOne(Plain):
    """Its judge is one compiled function, which calls both networks."""

    def __init__(self):
        super().__init__()
        self.judge = torch.compile(self.judge, backend="eager")


@pytest.mark.parametrize("policy", often(["zero3", "discriminator=pipeline,*=ddp"]))
def test_a_compiled_loss_is_refused_where_weights_are_sharded(policy, ranks):
    torch._dynamo.reset()
    for said in ranks(2).run(refused, AsOne, policy=policy, world=2):
        assert said.startswith("phase 'discriminator': its loss is compiled as one function, and no rank has all")


def test_compiled_networks_are_refused_where_torch_takes_graphs_of_frozen_weights_for_others():
    forgets = r"torch .* may leave out the gradients of weights .* install torch 2.12, or leave"
    with mock.patch.object(compiled, "FORGETFUL", True):
        assert re.search(rf"^player 'generator': the game compiles its network, and {forgets}", refused(InPlace))
        assert re.search(rf"^player 'generator': {forgets}", refused(Plain, policy="single+compile"))


class OwnPenalised(Penalised):
    def __init__(self):
        super().__init__()
        self.discriminator = Layers(*self.discriminator)
        self.discriminator.compile(backend="aot_eager")


def test_a_gradient_penalty_of_a_network_that_the_game_compiles_says_what_to_type():
    torch._dynamo.reset()
    said = refused(OwnPenalised, policy="single", steps=1)
    assert "a compiled player cannot be differentiated twice (discriminator); leave torch.compile out of" in said
    assert (
        "type --strategy discriminator=ddp+compile,*=single and type Phase('discriminator', ..., second_order" in said
    )
