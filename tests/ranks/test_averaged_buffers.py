"""Player(ema_buffers="averaged"): running statistics that are averaged with the weights, as in a loop by hand."""

import copy
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lightning import Callback
from torch import nn

from gan import Player
from gan.app.painting.reopen import _load
from gan.files.checkpoint import load
from gan.files.errors import UserError
from gan.runs import Run
from tests.support import opening
from tests.support.duel import ENGINES, POLICIES, ByHand, Duel, adam, fit, fooling, judging, of, played
from tests.support.parity import BROKEN, EXACT, distance, often

AVERAGED = {"ema_buffers": "averaged"}


def normed():
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6))


def taught(nets, x):
    return fooling(nets.score, nets.generator, x) + (nets.generator(x[:, :4]) - nets.slow(x[:, :4])).square().mean()


class Normed(Duel):
    """The generator keeps an average, and another player is one. Losses see the buffers of that one."""

    words: ClassVar = AVERAGED

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.generator = normed()
        self.slow = copy.deepcopy(self.generator)

    def configure_players(self):
        yield Player("generator", self.generator, adam, ema=0.8, **self.words)
        yield Player("judge", self.judge, adam)
        yield Player("slow", self.slow, follows="generator", ema=0.7, **self.words)

    def fooling(self, batch):
        return taught(self, batch["x"])


class Copied(Normed):
    words: ClassVar = {}


class NormedByHand(ByHand):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.generator = normed().double()
        self.take({"generator": self.generator, "judge": self.judge})
        self.slow, self.smooth = (copy.deepcopy(self.generator).eval() for _ in range(2))
        self.networks = {**self.networks, "slow": self.slow}

    def losses(self, turn):
        return (lambda score, generator, x: taught(self, x)) if turn == "fool" else judging

    def updated(self, name):
        for net, decay in ((self.smooth, 0.8), (self.slow, 0.7)) if name == "generator" else ():
            for mean, value in zip(net.state_dict().values(), self.generator.state_dict().values(), strict=True):
                mean.copy_(decay * mean + (1 - decay) * value if value.is_floating_point() else value)
        self.kept = {f"ema generator.{key}": value for key, value in self.smooth.state_dict().items()}


@pytest.fixture(scope="module")
def by_hand():
    return NormedByHand().run()


play = partial(played, sync_batchnorm=True)


@pytest.mark.parametrize(("policy", "world"), often({**POLICIES, **ENGINES}.items()))
def test_they_are_averaged_as_by_hand(policy, world, ranks, by_hand):
    assert {"ema generator.1.running_var", "ema generator.1.num_batches_tracked"} < by_hand.keys()
    assert distance(of(play(ranks, Normed, policy, world), by_hand), by_hand) < EXACT


def test_the_control_with_live_buffers_is_another_training(by_hand):
    found = fit(Copied, "single", 1)
    assert not any(name.startswith("ema generator.1.running") for name in found)
    weights = {name: value for name, value in by_hand.items() if name.startswith("weight slow")}
    assert distance(of(found, weights), weights) > BROKEN


class Sees(Callback):
    """The generator's state within `averaged()` after each step."""

    def on_train_batch_end(self, trainer, game, *_):
        before = {name: buffer.clone() for name, buffer in game.generator.named_buffers()}
        with game.averaged():
            self.found = {f"ema generator.{k}": v.clone() for k, v in game.generator.state_dict().items()}
        assert distance(dict(game.generator.named_buffers()), before) == 0


def seen(policy, world):
    sees = Sees()
    fit(Normed, policy, world, callbacks=[sees], sync_batchnorm=True)
    return sees.found


@pytest.mark.parametrize(("policy", "world"), often([("ddp", 2), ("zero3", 2), ("fsdp", 2)]))
def test_they_are_used_with_averaged_weights(policy, world, ranks, by_hand):
    found = ranks(world).run(seen, policy, world)[0]
    assert distance(found, of(by_hand, found)) < EXACT


HALF = 5


def test_they_are_saved_travel_and_are_exported(ranks, by_hand, tmp_path):
    half, end = tmp_path / "half.ckpt", tmp_path / "end.ckpt"
    play(ranks, Normed, "zero3", 2, steps=HALF, save=str(half))
    arrived = play(ranks, Normed, "ddp", 4, resume=str(half), save=str(end))
    assert distance(of(arrived, by_hand), by_hand) < EXACT

    game, saved = Normed().double(), load(Path(end))
    _load(Run(game, None, 1), saved, end)
    opened = {f"ema generator.{key}": value for key, value in game.generator.state_dict().items()}
    assert distance(opened, of(by_hand, opened)) < EXACT
    written = opening.exported(Normed(), end, "ema")[0].state
    assert distance({f"ema generator.{key}": value for key, value in written.items()}, opened) == 0

    copied = type("Normed", (Copied,), {})
    fit(copied, "single", 1, steps=HALF, save=str(tmp_path / "copied.ckpt"))
    with pytest.raises(UserError, match=r"player 'generator': the checkpoint has no average of '1\..*'"):
        fit(Normed, "single", 1, resume=str(tmp_path / "copied.ckpt"))
