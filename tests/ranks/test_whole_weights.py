"""zero1 for optimizers that look at whole weights: each rank steps some of them."""

from dataclasses import replace
from functools import partial
from typing import ClassVar
from unittest import mock

import pytest
import torch
from lightning import Callback
from torch import nn
from torch.optim import Adagrad

from gan import GanModule, Phase, Player
from strategies import PhaseStrategy
from strategies.policies import zero1
from strategies.sharding.whole_weights import WholeWeights
from tests.support.duel import Duel, fit, played
from tests.support.hard_games import HARD
from tests.support.matrix_optimizers import Drawing, MuonAndAdam, NormedTogether, Shampoo
from tests.support.parity import BROKEN, EXACT, distance, equals, parts, refused, train, trainer
from tests.support.watch import moved


def optimized(game: type[GanModule], optimizer) -> type[GanModule]:
    """The game with another optimizer for all that learn."""

    class Game(game):
        def configure_players(self):
            for player in super().configure_players():
                yield player if player.frozen else replace(player, optimizer=optimizer)

    return Game


SHAMPOO, MUON = partial(Shampoo, lr=1e-2), partial(MuonAndAdam, lr=1e-2)


def trained(name, optimizer, policy="single", world=1):
    return train(optimized(HARD[name], optimizer), policy=policy, world=world)


# SometimesReached has weights without gradients, Teacher a frozen player, Plain an average, a schedule and a clip.
@pytest.mark.parametrize(
    ("name", "optimizer", "policy", "world"),
    [
        pytest.param("Plain", SHAMPOO, "zero1", 2, marks=pytest.mark.slow),
        ("Plain", MUON, "zero1", 4),
        ("Plain", MUON, "zero1+hybrid:2", 4),
        ("SometimesReached", SHAMPOO, "zero1", 4),
        ("Teacher", SHAMPOO, "generator=zero1,*=ddp", 2),
        pytest.param("OwnMethods", partial(Adagrad, lr=1e-2), "zero1", 2, marks=pytest.mark.slow),
    ],
)
def test_it_trains_as_one_device(name, optimizer, policy, world, ranks):
    equals(ranks(world).run(trained, name, optimizer, policy, world), trained(name, optimizer))


# ---- controls ----


def unsent(name, optimizer, world):
    with mock.patch.object(WholeWeights, "_send"):
        return trained(name, optimizer, "zero1", world)


def dealt_blindly(name, optimizer, world):
    with mock.patch.object(zero1, "why_not_apart", lambda *_: None):
        return trained(name, optimizer, "zero1", world)


def test_the_controls_without_sending_and_without_the_trial_differ(ranks):
    assert distance(ranks(2).run(unsent, "Plain", SHAMPOO, 2)[0], trained("Plain", SHAMPOO)) > BROKEN
    together = partial(NormedTogether, lr=1e-2)
    assert distance(ranks(2).run(dealt_blindly, "Plain", together, 2)[0], trained("Plain", together)) > BROKEN


# ---- refusals ----


def refusal(optimizer, policy, world):
    return refused(optimized(HARD["Plain"], optimizer), policy=policy, world=world, steps=1)


@pytest.mark.parametrize(
    ("optimizer", "policy", "words", "instead"),
    [
        (NormedTogether, "zero1", "does not work with NormedTogether: its step on weight '", "generator=ddp,*=zero1"),
        (Drawing, "zero1", "depends on other weights, or on random numbers", "generator=ddp,*=zero1"),
        (SHAMPOO, "zero1+offload", "Shampoo looks at whole weights", "generator=zero1,*=zero1+offload"),
        (SHAMPOO, "zero3", "'zero3' cuts weights into pieces, and Shampoo", "generator=zero1,*=zero3"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(optimizer, policy, words, instead, ranks):
    for message in ranks(2).run(refusal, optimizer, policy, 2):
        assert message.startswith("player 'generator': ")
        assert words in message
        assert f"type --strategy {instead}" in message


# ---- what a rank holds, and what is moved ----


class Layers(GanModule):
    """Eight matrices."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(8)))

    def configure_players(self):
        yield Player("net", self.net, SHAMPOO, ema=0.9)

    def configure_phases(self):
        yield Phase("net", lambda batch: self.net(batch["x"]).square().mean(), "net")


class Weighing(Callback):
    """How many numbers the optimizer and the average hold after a step."""

    def on_train_batch_end(self, trainer, *_):
        policy = trainer.strategy.policies["net"]
        factors = [factor for state in policy.optimizer.state.values() for factor in state["factors"]]
        self.held = sum(t.numel() for t in factors), sum(t.numel() for t in policy.ema.average)


def held(world):
    weighing = Weighing()
    trainer(PhaseStrategy("zero1", check=False), world, 2, callbacks=[weighing]).fit(Layers(), parts(2, world))
    return weighing.held


def test_state_and_average_are_shared_out(ranks):
    numbers = 8 * 36
    assert ranks(4).run(held, 4) == [(2 * numbers / 4, numbers / 4)] * 4


def test_an_update_moves_each_weight_once(ranks):
    exact = 8 * 8 * 36  # bytes
    step, _, collectives = ranks(2).run(moved, Layers, "zero1", 2, 3)[0][-1]
    assert step == 2
    assert collectives == [("allreduce_", exact), ("broadcast_", exact / 2), ("broadcast_", exact / 2)]


def stale_graph(policy, world):
    """A graph of before an update runs backward after it."""
    kept = []

    class Game(Layers):
        def configure_phases(self):
            yield from super().configure_phases()
            yield Phase("again", self.again, "net")

        def again(self, batch):
            kept.append(self.net(batch["x"]).square().mean())
            return kept[0]

    try:
        trainer(PhaseStrategy(policy, check=False), world, 2).fit(Game(), parts(2, world))
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error) or "second time" in str(error)
    return False


def test_a_graph_of_old_weights_is_an_error_on_every_rank(ranks):
    assert ranks(2).run(stale_graph, "zero1", 2) == [True, True]


# ---- checkpoints ----


class Saved(Duel):
    """With state that is no tensor, and state in lists."""

    of_judge: ClassVar = {"ema": 0.7}

    def configure_players(self):
        for player in super().configure_players():
            yield replace(player, optimizer=SHAMPOO)


STEPS, HALF = 6, 3


def test_it_resumes_bit_for_bit(ranks, tmp_path):
    path = str(tmp_path / "half.ckpt")
    unbroken = ranks(2).run(fit, Saved, "zero1", 2, STEPS)
    ranks(2).run(fit, Saved, "zero1", 2, HALF, save=path)
    for one, other in zip(ranks(2).run(fit, Saved, "zero1", 2, STEPS, resume=path), unbroken, strict=True):
        assert distance(one, other) == 0


@pytest.mark.slow
def test_a_checkpoint_goes_from_policy_to_policy(ranks, tmp_path):
    path, expected = None, fit(Saved, "single", 1, 5)
    for step, (policy, world) in enumerate([("zero1", 4), ("ddp", 2), ("zero1", 2), ("single", 1), ("zero1", 4)], 1):
        before, path = path, str(tmp_path / f"{step}.ckpt")
        arrived = played(ranks, Saved, policy, world, steps=step, save=path, resume=before)
    assert distance(arrived, expected) < EXACT


def only_own(storage, values):
    return values


def forgetful(path):
    with mock.patch.object(WholeWeights, "values_of_all", only_own):
        return fit(Saved, "zero1", 2, HALF, save=path)


def test_the_control_that_saves_the_first_ranks_numbers_alone_differs(ranks, tmp_path):
    path, expected = str(tmp_path / "half.ckpt"), fit(Saved, "single", 1, STEPS)
    ranks(2).run(forgetful, path)
    with pytest.raises((RuntimeError, KeyError)):
        assert distance(played(ranks, Saved, "ddp", 2, steps=STEPS, resume=path), expected) < EXACT
