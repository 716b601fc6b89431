"""Lightning's hooks around backward and update: called for each learner, or refused by name."""

import pytest
import torch
from lightning import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback, StochasticWeightAveraging
from torch.optim import Adam

from gan.errors import UserError
from strategies import PhaseStrategy
from strategies.hooks import INSTEAD, NO_HOOKS
from tests.support.hard_games import Micro2, Plain
from tests.support.parity import BROKEN, distance, equals, parts, refused, train, trainer, weights

ORDER = ["on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"]


def noting(base, notes):
    """A class whose hooks write down who was called, and with what."""

    def hook(name):
        def call(self, *args):
            given = [each for each in args if isinstance(each, (torch.Tensor, Adam))]
            notes.append((base.__name__, name, [type(each).__name__ for each in given]))

        return call

    return type("Noting", (base,), {name: hook(name) for name in ORDER})


def called(policy, world=1, game=Plain, devices=None):
    notes = []
    trainer(PhaseStrategy(policy), devices or world, 1, callbacks=[noting(Callback, notes)()]).fit(
        noting(game, notes)(), parts(1, world)
    )
    return notes


EXPECTED = [
    ("on_before_backward", ["Tensor"]),
    ("on_after_backward", []),
    ("on_before_optimizer_step", ["Adam"]),
    ("on_before_zero_grad", ["Adam"]),
]


@pytest.mark.parametrize("policy", ["single", "ddp", "zero1", "zero2", "zero3"])
def test_they_are_called_in_lightnings_order_for_each_learner(policy, ranks):
    expected = [(who, name, args) for name, args in EXPECTED for who in ("Callback", "Plain")] * 2
    for notes in [called("single")] if policy == "single" else ranks(2).run(called, policy, 2):
        assert notes == expected


def test_those_of_backward_are_called_for_each_micro_batch():
    names = [name for who, name, _ in called("single", game=Micro2) if who == "Callback"]
    assert names == (ORDER[:2] * 2 + ORDER[2:]) * 2


def test_where_nobody_overrides_them_nothing_is_wanted():
    strategy = PhaseStrategy("single")
    trainer(strategy, 1, 1, callbacks=[Callback()]).fit(Plain(), parts(1))
    assert not strategy.hooks.wanted and not NO_HOOKS.wanted
    given, strategy = LambdaCallback(on_before_zero_grad=lambda *_: None), PhaseStrategy("single")
    trainer(strategy, 1, 1, callbacks=[given]).fit(Plain(), parts(1))
    assert set(strategy.hooks.wanted) == {"on_before_zero_grad"}


# ---- what they may change ----


class Shrinks(Plain):
    """Changes gradients element by element, as a person's own clipping or noise does, before the player's clip."""

    clip = 0.05

    def on_before_optimizer_step(self, optimizer):
        for group in optimizer.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.grad.clamp_(-1e-2, 1e-2)


class Looks(Shrinks):
    """The control: the hook changes nothing."""

    def on_before_optimizer_step(self, optimizer):
        pass


class Notes(Callback):
    """The largest gradient that a hook sees, over all ranks, and the loss that it logs."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, game, optimizer):
        there = [p.grad.abs().max() for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        largest = torch.stack([torch.zeros((), dtype=torch.float64), *there]).max()
        self.seen.append(max(trainer.strategy.gather_objects(largest.item())))
        game.log("largest", largest)


def looked(policy, world=1):
    notes = Notes()
    trainer(PhaseStrategy(policy), world, 3, callbacks=[notes]).fit(Plain(), parts(3, world))
    return notes.seen


@pytest.mark.parametrize("policy", ["dp", "ddp", "zero1", "zero2", "zero3", "zero2+offload"])
def test_a_hook_changes_gradients_exactly(policy, ranks):
    """Also those that the clip then measures."""
    alone = train(Shrinks, policy="single")
    assert distance(alone, train(Looks, policy="single")) > BROKEN
    if policy == "dp":
        found = [train(Shrinks, policy="dp", devices=2)]
    else:
        found = ranks(2).run(train, Shrinks, policy=policy, world=2)
    equals(found, alone)


@pytest.mark.parametrize("policy", ["ddp", "zero1", "zero2", "zero3"])
def test_a_hook_sees_gradients_that_are_reduced(policy, ranks):
    alone = looked("single")
    for seen in ranks(2).run(looked, policy, 2):
        assert seen == pytest.approx(alone, abs=1e-12)


def test_dp_refuses_those_that_each_device_would_call():
    class Game(Plain):
        def on_after_backward(self):
            pass

    with pytest.raises(UserError, match=r"dp does not call on_after_backward of Game.*type --strategy ddp"):
        trainer(PhaseStrategy("dp"), 2, 1).fit(Game(), parts(1))


# ---- what nobody calls ----


@pytest.mark.parametrize("name", INSTEAD)
def test_a_method_that_is_not_called_is_refused(name):
    game = type("Game", (Plain,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(UserError, match=rf"Game has a method {name}\(\), which PhaseStrategy does not call; ") as said:
        train(game, policy="single", steps=1)
    assert INSTEAD[name] in str(said.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"gradient_clip_val": 0.5},
            r"Trainer\(gradient_clip_val=0.5\) is for one optimizer; type Player\(..., clip=0.5",
        ),
        ({"accumulate_grad_batches": 4}, r"Trainer\(accumulate_grad_batches=4\).*Phase\(..., micro_batches=4\)"),
        ({"callbacks": [GradientAccumulationScheduler({1: 2})]}, r"GradientAccumulationScheduler.*micro_batches"),
        ({"callbacks": [StochasticWeightAveraging(1e-2)]}, r"StochasticWeightAveraging.*Player\(..., ema=0.999\)"),
    ],
)
def test_a_setting_for_one_optimizer_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        train(Plain, policy="single", steps=1, **settings)


def test_automatic_optimization_is_refused():
    class Game(Plain):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = True

    assert "sets automatic_optimization = True; leave it out" in refused(Game, policy="single", steps=1)


# ---- training by hand ----


class ByHand(Plain):
    """A Lightning GAN that somebody moves here."""

    def training_step(self, batch):
        optimizer, _ = self.optimizers()
        loss = self.fool(batch)
        self.manual_backward(loss)
        optimizer.step()


BY_HAND = {
    "optimizers": lambda game, batch: game.optimizers(),
    "lr_schedulers": lambda game, batch: game.lr_schedulers(),
    "manual_backward": lambda game, batch: game.manual_backward(game.fool(batch)),
    "toggle_optimizer": lambda game, batch: game.toggle_optimizer(game.trainer.optimizers[0]),
    "clip_gradients": lambda game, batch: game.clip_gradients(game.trainer.optimizers[0], 1.0),
}


@pytest.mark.parametrize("call", BY_HAND)
def test_training_by_hand_is_refused(call):
    game = type("Game", (Plain,), {"training_step": BY_HAND[call]})
    with pytest.raises(
        UserError, match=rf"Game calls self.{call}\(\), but what is trained by hand is not synch"
    ) as said:
        train(game, policy="single", steps=1)
    assert "configure_phases()" in str(said.value)


def by_hand(policy, world):
    return refused(ByHand, policy=policy, world=world, steps=1)


@pytest.mark.parametrize("policy", ["ddp", "zero3"])
def test_it_is_refused_on_all_ranks(policy, ranks):
    for said in ranks(2).run(by_hand, policy, 2):
        assert said is not None and "ByHand calls self.optimizers()" in said


def unrefused():
    """The control: as if Lightning's methods were still there. Beside it, the phases are played."""

    class Game(ByHand):
        optimizers, manual_backward = LightningModule.optimizers, LightningModule.manual_backward

        def training_step(self, batch):
            super(ByHand, self).training_step(batch)
            super().training_step(batch)

    return train(Game, world=2, steps=3)


def test_the_control_where_it_is_not_refused_is_not_synchronised(ranks):
    one, other = ranks(2).run(unrefused)
    assert distance(weights(one), weights(other)) > BROKEN


class Own(Plain):
    """A step of its own around that of GanModule."""

    def training_step(self, batch):
        super().training_step({"x": batch["x"] * 2})
        self.log("rows", float(len(batch["x"])))


class Doubled(Plain):
    def judge(self, batch):
        return super().judge({"x": batch["x"] * 2})

    def fool(self, batch):
        return super().fool({"x": batch["x"] * 2})


@pytest.mark.parametrize("policy", ["dp", "ddp", "zero3"])
def test_a_step_of_ones_own_around_ours_is_played(policy, ranks):
    alone = train(Doubled, policy="single")
    found = [train(Own, policy="dp", devices=2)] if policy == "dp" else ranks(2).run(train, Own, policy=policy, world=2)
    equals(found, alone)
    assert distance(alone, train(Plain, policy="single")) > BROKEN


class Forgets(Plain):
    def training_step(self, batch):
        return batch["x"].mean()


def test_a_step_that_plays_no_phase_is_an_error():
    said = refused(Forgets, policy="single", steps=1)
    assert (
        "training_step() of Forgets played no phase, so nothing has learned; call super().training_step(batch)" in said
    )
