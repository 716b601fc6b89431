"""Lightning's hooks around backward and update: called for each learner, or refused by name."""

from datetime import timedelta
from unittest.mock import MagicMock

import pytest
import torch
from lightning import Callback
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import nn
from torch.optim import Adam, Optimizer

from gan.files.errors import UserError
from gan.ranks import mean
from strategies import PhaseStrategy
from strategies.hooks import INSTEAD
from strategies.sharding.resharded_parameter import resharded
from tests.support.doubled import doubled
from tests.support.hard_games import Micro2, Plain
from tests.support.parity import often, parts, refused, train, trainer

ORDER = ["on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"]


def noting(base, notes):
    """A class whose hooks write down who was called, with what, and for which player."""

    def hook(name):
        def call(self, *args):
            of = [self.player_of(each).name for each in args if isinstance(each, Optimizer) and base is not Callback]
            given = [type(each).__name__ for each in args if isinstance(each, (torch.Tensor, Adam))]
            notes.append((base.__name__, name, of or given))

        return call

    return type("Noting", (base,), {name: hook(name) for name in ORDER})


def called(policy, world=1, game=Plain):
    notes = []
    with doubled(policy):
        made = trainer(PhaseStrategy(policy), world, 1, callbacks=[noting(Callback, notes)()])
        made.fit(noting(game, notes)(), parts(1, world))
    return notes


@pytest.mark.promise("Lightning's hooks of backward and update", "the training of one device, or a refusal by name")
@pytest.mark.parametrize("policy", often(["single", "ddp", "zero1", "zero2", "zero3", "fsdp", "deepspeed2"], ["zero3"]))
def test_they_are_called_in_lightnings_order_for_each_learner_and_know_it(policy, ranks):
    expected = []
    for learner in ("discriminator", "generator"):
        for name, given in zip(ORDER, (["Tensor"], [], ["Adam"], ["Adam"]), strict=True):
            expected += [("Callback", name, given), ("Plain", name, [learner] if given == ["Adam"] else given)]
    for notes in [called("single")] if policy == "single" else ranks(2).run(called, policy, 2):
        assert notes == expected


def test_those_of_backward_are_called_for_each_micro_batch():
    names = [name for who, name, _ in called("single", game=Micro2) if who == "Callback"]
    assert names == (ORDER[:2] * 2 + ORDER[2:]) * 2


def test_where_nobody_overrides_them_nothing_is_wanted():
    strategy = PhaseStrategy("single")
    trainer(strategy, 1, 1, callbacks=[Callback()]).fit(Plain(), parts(1))
    assert not strategy.steps.training.hooks.wanted
    given, strategy = LambdaCallback(on_before_zero_grad=lambda *_: None), PhaseStrategy("single")
    trainer(strategy, 1, 1, callbacks=[given]).fit(Plain(), parts(1))
    assert set(strategy.steps.training.hooks.wanted) == {"on_before_zero_grad"}


# ---- what they may change ----


class Surgery(Plain):
    """PCGrad and its kind: the hook puts gradients that the loss has made in place of the reduced ones."""

    of_all = staticmethod(lambda gradient: gradient)

    def judge(self, batch):
        losses = super().judge(batch)
        made = torch.autograd.grad(losses["real"], list(self.discriminator.parameters()), retain_graph=True)
        self.made = [self.of_all(each) for each in made]
        return losses

    def on_before_optimizer_step(self, optimizer):
        if self.player_of(optimizer).name == "discriminator":
            for weight, gradient in zip(self.discriminator.parameters(), self.made, strict=True):
                weight.grad = gradient / gradient.norm()


class SurgeryOfAll(Surgery):
    of_all = staticmethod(mean)


@pytest.mark.parametrize("policy", often(["ddp", "zero2", "zero3", "fsdp"], ["zero3"]))
def test_gradients_of_one_ranks_samples_in_place_of_the_reduced_ones_are_refused(policy, ranks):
    for said in ranks(2).run(refused, Surgery, policy=policy, world=2, steps=1, check=True):
        assert said is not None
        assert "'discriminator': on_before_optimizer_step has left other gradients on each rank" in said
    assert ranks(2).run(refused, SurgeryOfAll, policy=policy, world=2, steps=1, check=True) == [None, None]


# ---- what nobody calls ----


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"gradient_clip_val": 0.5},
            r"Trainer\(gradient_clip_val=0.5\) is for one optimizer; type Player\(..., clip=0.5",
        ),
        (
            {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"},
            r"on_before_optimizer_step\(self, optimizer\): for .* torch.nn.utils.clip_grad_value_\(group.*, 0.5\)",
        ),
        ({"accumulate_grad_batches": 4}, r"Trainer\(accumulate_grad_batches=4\).*Phase\(..., micro_batches=4\)"),
        (
            {"callbacks": [ModelCheckpoint(train_time_interval=timedelta(1))], "enable_checkpointing": True},
            "never saves .* type every_n_train_steps=",
        ),
        ({"callbacks": [GradientAccumulationScheduler({1: 2})]}, r"GradientAccumulationScheduler.*micro_batches"),
        ({"callbacks": [StochasticWeightAveraging(1e-2)]}, r"StochasticWeightAveraging.*Player\(..., ema=0.999\)"),
        ({"callbacks": [EMAWeightAveraging()]}, r"EMAWeightAveraging is for one network.*Player\(..., ema=0.999\)"),
        ({"callbacks": [BackboneFinetuning()]}, r"BackboneFinetuning.*Player\(..., freeze=...\)"),
        ({"callbacks": [LearningRateFinder()]}, r"LearningRateFinder.*give each player's optimizer a rate"),
        (
            {"logger": WandbLogger(log_model="all", experiment=MagicMock())},
            r"WandbLogger\(log_model=...\) uploads files, and a checkpoint here is a folder; leave log_model out",
        ),
        ({"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]}, r"ModelPruning.*by torch.nn.utils.prune"),
    ],
)
def test_a_setting_for_one_optimizer_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        train(Plain, policy="single", steps=1, **settings)


# ---- training by hand ----


BY_HAND = {
    "optimizers": lambda game, batch: game.optimizers(),
    "lr_schedulers": lambda game, batch: game.lr_schedulers(),
    "manual_backward": lambda game, batch: game.manual_backward(game.fool(batch)),
    "toggle_optimizer": lambda game, batch: game.toggle_optimizer(game.trainer.optimizers[0]),
    "clip_gradients": lambda game, batch: game.clip_gradients(game.trainer.optimizers[0], 1.0),
}


NO_PHASE = "training_step() of Game played no phase, so nothing has learned; call super().training_step(batch)"
OWN = {
    **{
        name: ({name: lambda game, *args, **kwargs: None}, (f"Game has a method {name}(), which Phase", INSTEAD[name]))
        for name in INSTEAD
    },
    **{
        name: (
            {"training_step": call},
            (
                f"Game calls self.{name}(), but what is trained by hand is not synch",
                "configure_phases()",
                "rate take self.trainer.optimizers, or" if name in ("optimizers", "lr_schedulers") else "",
            ),
        )
        for name, call in BY_HAND.items()
    },
    "no phase": ({"training_step": lambda game, batch: batch["x"].mean()}, (NO_PHASE,)),
    "one of Lightning 1": (
        {"training_step": lambda game, batch, batch_idx, optimizer_idx: None},
        ("training_step is called with a batch and its number, in place of the phases, and needs batch, batch_idx, ",),
    ),
    "a new layer": (
        {"on_train_batch_end": lambda game, *_: game.generator.append(nn.Linear(6, 6).double())},
        ("player 'generator': weight '3.weight' was added while training", "let a phase with start= use them"),
    ),
    "automatic": (
        {"automatic_optimization": property(lambda game: True, lambda game, given: None)},
        ("Game sets automatic_optimization = True; leave it out",),
    ),
}


@pytest.mark.promise("Lightning's hooks of backward and update")
@pytest.mark.promise("Lightning's manual optimization", "the training of one device, or a refusal by name")
@pytest.mark.parametrize(("own", "words"), OWN.values(), ids=OWN)
def test_methods_that_would_not_train_as_meant_are_refused(own, words):
    said = refused(type("Game", (Plain,), own), policy="single", steps=2)
    assert said is not None and all(each in said for each in words)


def compiled():
    with pytest.raises(UserError, match=r"pass the game itself, and type PhaseStrategy\('ddp\+compile'\)"):
        trainer(PhaseStrategy("ddp"), 2, 1).fit(torch.compile(Plain()), parts(1, 2))


class Example(Plain):
    """Lightning's model summary and log_graph call it."""

    def __init__(self):
        super().__init__()
        self.example_input_array, self.began = torch.zeros(2, 4, dtype=torch.float64), []

    def forward(self, z):
        return self.generator(z)

    def on_fit_start(self):
        self.began.append([resharded(weight) for weight in self.generator.parameters()])


def began(policy):
    game = Example()
    trainer(PhaseStrategy(policy, check=False), 2, 1, enable_model_summary=True).fit(game, parts(1, 2))
    return game.began, "on_fit_start" in vars(game)


@pytest.mark.parametrize("policy", often(["zero3", "fsdp"], ["zero3"]))
def test_the_model_summary_calls_a_game_with_whole_weights(policy, ranks):
    (hook, *more), replaced = ranks(2).run(began, policy)[0]
    assert all(hook) and not more and not replaced


def test_a_graph_that_one_rank_would_log_alone_is_refused(ranks, tmp_path):
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    for said in ranks(2).run(refused, Example, policy="generator=zero3,*=ddp", world=2, steps=1, logger=logger):
        assert said == (
            "player 'generator': a logger with log_graph=True calls the game on the first rank alone, which has not "
            "all weights under 'zero3'; type log_graph=False"
        )


def test_a_game_that_is_compiled_as_a_whole_is_refused_on_several_ranks(ranks):
    ranks(2).run(compiled)
