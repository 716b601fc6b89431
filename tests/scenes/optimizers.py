"""Optimizers that look at whole weights, or keep two kinds of weights."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam
from torch.optim.lr_scheduler import StepLR

from gan import Phase, Player, noise
from tests.support.duel import ByHand, Duel
from tests.support.hard_games import HARD, Outdated
from tests.support.optimizers import (
    Careless,
    Dealing,
    Drawing,
    MuonAndAdam,
    NormedTogether,
    Optimistic,
    ScheduleFree,
    Shampoo,
)
from tests.support.scene import ENGINES, POLICIES, SMALL, Mutant, Refused, Scene, having, made_of

PLAIN = HARD["Plain"]
THEIRS = partial(type("Adam", (Adam,), {"__module__": "theirs"}), lr=1e-3)
SHAMPOO, MUON = partial(Shampoo, lr=1e-2), partial(MuonAndAdam, lr=1e-2)

# ---- two kinds of weights ----


class Free(Duel):
    """It keeps what a validation sees."""

    def configure_players(self):
        for player in super().configure_players():
            yield replace(player, optimizer=ScheduleFree)

    def validation_step(self, batch):
        self.seen = {name: weight.detach().clone() for name, weight in self.judge.named_parameters()}


class FreeByHand(ByHand):
    """With the average computed from its definition: x moves to z by 1 / k."""

    moments = ("z",)
    make_optimizer = ScheduleFree

    def __init__(self):
        super().__init__()
        for optimizer in self.optimizers.values():
            optimizer.train()
        self.x = {name: [w.detach().clone() for w in net.parameters()] for name, net in self.networks.items()}

    def updated(self, name):
        optimizer, names = self.optimizers[name], [key for key, _ in self.networks[name].named_parameters()]
        k = optimizer.param_groups[0]["k"]
        for key, x, weight in zip(names, self.x[name], self.networks[name].parameters(), strict=True):
            x.lerp_(optimizer.state[weight]["z"], 1 / k)
            self.kept[f"ema {name}.{key}"] = x


# ---- two optimizers over one network ----

informing_adam, falling = partial(Adam, lr=1e-2, betas=(0.5, 0.999)), partial(StepLR, step_size=2, gamma=0.5)


class Informed(Duel):
    """As InfoGAN: a third turn, in which both networks learn by an optimizer of its own."""

    of_generator: ClassVar = {"schedule": falling, "ema": 0.9, "clip": 0.5}
    optimizer: Any = staticmethod(informing_adam)

    def configure_phases(self):
        yield from super().configure_phases()
        yield Phase("inform", self.informing, ("generator", "judge"), every=2, optimizer=self.optimizer)

    def informing(self, batch):
        return informing(self.score, self.generator, batch["x"])


def informing(score: Any, generator: Any, x: Tensor) -> Tensor:
    return (score(generator(x[:, :4])) - x[:, :1]).square().mean()


class InformedByHand(ByHand):
    clip: ClassVar = {"generator": 0.5}
    turns: ClassVar = {**ByHand.turns, "inform": ("generator", "judge")}

    def __init__(self):
        super().__init__()
        third = {f"{name} in inform": informing_adam(net.parameters()) for name, net in self.networks.items()}
        self.optimizers |= third
        self.schedules = {name: falling(of) for name, of in self.optimizers.items() if name.startswith("generator")}
        self.averages = {name: weight.detach().clone() for name, weight in self.generator.named_parameters()}

    def due(self, turn, step):
        return step % 2 == 0 if turn == "inform" else super().due(turn, step)

    def losses(self, turn):
        return informing if turn == "inform" else super().losses(turn)

    def step(self, turn, name):
        whose = f"{name} in inform" if turn == "inform" else name
        self.optimizers[whose].step()
        if whose in self.schedules:
            self.schedules[whose].step()

    def updated(self, name):
        for key, average in self.averages.items() if name == "generator" else ():
            self.kept[f"ema generator.{key}"] = average.lerp_(self.generator.get_parameter(key), 0.1)


# ---- whole weights ----


def optimized(game: Any, optimizer: Any) -> Any:
    """The game with another optimizer for all that learn."""

    class Game(game):
        def configure_players(self):
            for player in super().configure_players():
                yield player if player.frozen else replace(player, optimizer=optimizer)

    return Game


# ---- moments of a training before ----


def moments(optimizer: Any, *shape: int) -> dict[str, Any]:
    """A state_dict() as of an earlier training. `shape`: of other weights."""
    state = {}
    for number, weight in enumerate(optimizer.param_groups[0]["params"]):
        first = torch.linspace(-0.2, 0.3, weight.numel(), dtype=torch.float64).reshape(shape or weight.shape)
        state[number] = {"step": torch.tensor(7.0), "exp_avg": first, "exp_avg_sq": first.square()}
    (group,) = optimizer.param_groups
    return {"state": state, "param_groups": [{**group, "params": [*state]}]}


def going_on(weights: Any) -> Adam:
    optimizer = Adam(weights, lr=1e-2)
    optimizer.load_state_dict(moments(optimizer))
    return optimizer


class LoadsAtTheStart(optimized(PLAIN, partial(Adam, lr=1e-2))):
    moments = staticmethod(moments)

    def on_train_start(self):
        if self.trainer.global_step == 0:
            for optimizer in self.trainer.optimizers:
                optimizer.load_state_dict(self.moments(optimizer))


# ---- fused ----


class Turned(nn.Module):
    """A linear layer whose weight, or its gradient, lies in memory by columns. torch's fused optimizers do not look."""

    def __init__(self, inside: int, outside: int, *, lies: bool) -> None:
        super().__init__()
        weight = torch.randn(inside, outside).T / 3
        self.weight = nn.Parameter(weight if lies else weight.contiguous())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t().clone(memory_format=torch.contiguous_format)


class TurnedWeights(HARD["Micro2"]):
    fused = True

    def __init__(self) -> None:
        super().__init__()
        for name, lies in (("generator", False), ("discriminator", True)):
            layers = getattr(self, name)
            for number, layer in enumerate(layers):
                if isinstance(layer, nn.Linear):
                    layers[number] = Turned(layer.in_features, layer.out_features, lies=lies)

    def configure_players(self):
        for player in super().configure_players():
            yield replace(player, optimizer=partial(Adam, lr=1e-2, betas=(0.5, 0.9), fused=self.fused))


# ---- gradients of other kinds ----


class Sparse(PLAIN):
    how: ClassVar[dict[str, Any]] = {"sparse": True}

    def __init__(self) -> None:
        super().__init__()
        self.generator.append(nn.Embedding(3, 6, **self.how))

    def fake(self, real: Tensor) -> Tensor:
        *layers, table = self.generator
        return nn.Sequential(*layers)(noise.randn((len(real), 4), like=real)) + table((real[:, 0] > 0).long())


class Complex(PLAIN):
    """A filter of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.ModuleDict({"bands": Bands(), "paint": self.generator})

    def fake(self, real: Tensor) -> Tensor:
        return self.generator["paint"](self.generator["bands"](noise.randn((len(real), 4), like=real)))


class Bands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.view_as_complex(torch.randn(3, 2, dtype=torch.float64)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(x.double()) * self.gains, n=4)


class Quantised(PLAIN):
    """A frozen teacher in whole numbers."""

    scale = 0.01

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.ParameterList([nn.Parameter(torch.arange(6, dtype=torch.int8), requires_grad=False)])

    def configure_players(self) -> Iterator[Player]:
        yield from super().configure_players()
        yield Player("teacher", self.teacher)

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        return super().fool(batch) + (self.fake(batch["x"]) * self.teacher[0] * self.scale).square().mean()


# ---- the table ----


def refused(optimizer: Any, policy: str, words: str, instead: str) -> Refused:
    said = "player 'generator': ", words, f"type --strategy {instead}"
    return Refused(optimized(PLAIN, optimizer), policy, said)


BY_MUON = having(Informed, optimizer=staticmethod(MUON))
SPARSE = "the gradient of weight '3.weight' is sparse, and ranks add up dense ones; leave sparse=True out"
BY_FREQUENCY = having(Sparse, how={"scale_grad_by_freq": True})
BOUNDED, SPARSE_GAME = having(Sparse, how={"max_norm": 1.0}), optimized(Sparse, partial(SGD, lr=1e-2))
CARELESS = optimized(PLAIN, partial(Careless, defaults={"lr": 1e-2}))
PIPED, FORTH_AND_BACK = "generator=pipeline,*=ddp", "pipeline+chunks:2+schedule:1f1b"

OPTIMIZERS = {
    "a fused optimizer and weights that lie by columns": Scene(
        TurnedWeights, alone=having(TurnedWeights, fused=False),  # torch has tried that on all that lies otherwise
        often=("zero3",), saved=("ddp", "pipeline"),
        policies={
            **POLICIES, **ENGINES, "dp": 2, "pipeline": 2, FORTH_AND_BACK: 2, "zero1+offload": 2, "zero3+offload": 2,
            "zero3+whole": 2,
        },
    ),
    "moments_of_a_training_before": Scene(
        optimized(PLAIN, going_on), bucket=SMALL, often=("zero3",), saved=("zero3",), four=("zero3", "fsdp"),
        policies={**POLICIES, **ENGINES, "dp": 2, PIPED: 2, "zero1+offload": 2, "zero3+offload": 2},
        checked=("zero3",), arrives=(("single", 1),),
        mutants=(Mutant("they are forgotten", game=optimized(PLAIN, partial(Adam, lr=1e-2))),),
    ),
    "moments_loaded_at_the_start": Scene(
        LoadsAtTheStart, alone=optimized(PLAIN, going_on), policies={**POLICIES, **ENGINES, "zero3+offload": 2},
        bucket=SMALL, often=("zero3",), mutants=(), saved=("zero2",),
        refused=(
            Refused(
                having(LoadsAtTheStart, moments=staticmethod(lambda optimizer: moments(optimizer, -1))), "zero3",
                "got tensors that do not have the shapes of its weights", check=False,
            ),
            Refused(
                LoadsAtTheStart, "zero3+bf16", "would round its state to the type in which phases compute",
                settings={"precision": "bf16-mixed"}, check=False,
            ),
        ),
    ),
    "sparse gradients": Scene(
        SPARSE_GAME, policies={"single": 1}, often=(), mutants=(),
        refused=(Refused(SPARSE_GAME, "zero3 ddp zero1 zero2 fsdp dp", SPARSE),),
    ),
    "a table whose rows have a largest norm": Scene(
        BOUNDED, policies={"single": 1}, often=(), mutants=(),
        refused=(
            Refused(BOUNDED, "ddp zero3", "3 has max_norm=1.0, by which each rank would rescale the rows", check=False),
            Refused(
                BY_FREQUENCY, "ddp zero3",
                "3 has scale_grad_by_freq=True, by which each rank would count its own samples", check=False,
            ),
        ),
    ),
    "complex weights": Scene(Complex, policies={**POLICIES, "dp": 2}, often=("zero3",), saved=("zero3", "ddp")),
    "weights of whole numbers": Scene(
        Quantised, policies={"ddp": 2, "zero3": 2, "fsdp": 2}, often=("zero3",), saved=("zero3",),
        mutants=(Mutant("they are not used", game=having(Quantised, scale=0)),),
    ),
    "an optimizer of two kinds of weights": Scene(
        Free, FreeByHand().run, policies={"single": 1, "ddp": 2, "zero1": 2, "generator=zero1,*=ddp": 2},
        four=("zero1",), often=("zero1",), bucket=SMALL,
        saved=("zero1", "ddp", "single"), arrives=(("single", 1), ("ddp", 2), ("zero1", 4)),
        refused=(
            Refused(
                having(Free, of_judge={"ema": 0.9}), "ddp",
                "player 'judge': ScheduleFree keeps an average itself, which its eval() shows",
            ),
            Refused(Free, "zero3", "type --strategy generator=zero1,*=zero3"),
            Refused(Free, "fsdp", "type --strategy generator=zero1,*=fsdp"),
        ),
    ),
    "two_optimizers_over_one_network": Scene(
        Informed, InformedByHand().run, steps=6,
        policies={**POLICIES, **ENGINES, "dp": 2, PIPED: 2, "zero1+offload": 2, "zero3+offload": 2},
        often=("zero3",), four=("zero3",), checked=("zero1", "zero2"),
        saved=("zero3", "ddp"), arrives=(("single", 1), ("zero1", 2)), bucket=SMALL,
        mutants=(Mutant("one optimizer", game=having(Informed, optimizer=None)),),
        refused=(
            Refused(BY_MUON, "zero3", "'zero3' cuts weights into pieces, and MuonAndAdam"),
            Refused(
                having(Informed, of_generator={}, optimizer=ScheduleFree), "ddp",
                "ScheduleFree keeps an average itself, and so it must be the only",
            ),
        ),
    ),
    # SometimesReached has weights without gradients, Teacher a frozen player, Plain an average, a schedule and a clip.
    "whole_weights": Scene(
        optimized(PLAIN, SHAMPOO), policies={"zero1": 2}, often=("zero1",),
        refused=(
            refused(
                NormedTogether, "zero1", "does not work with NormedTogether: its step on weight '",
                "generator=ddp,*=zero1",
            ),
            refused(
                NormedTogether, "generator=pipeline,*=ddp", "'pipeline' gives each rank some of the weights",
                "generator=ddp,*=ddp",
            ),
            refused(Drawing, "zero1", "depends on other weights, or on random numbers", "generator=ddp,*=zero1"),
            refused(
                Dealing, "zero1", "its step calls torch.distributed (step in optimizers.py:", "generator=ddp,*=zero1"
            ),
            refused(
                SHAMPOO, "zero1+offload", "Shampoo looks at whole weights", "generator=zero1,*=zero1+offload"
            ),
            refused(SHAMPOO, "zero3", "'zero3' cuts weights into pieces, and Shampoo", "generator=zero1,*=zero3"),
            refused(THEIRS, "zero3", "the Adam of theirs may", "generator=zero1,*=zero3, or use torch.optim.Adam"),
            # Of a weight and a bias each rank owns one, and both find by themselves that the weight has changed.
            Refused(
                optimized(made_of(Outdated, discriminator=partial(nn.Linear, 6, 1)), SHAMPOO), "zero1",
                "modified by an inplace operation", unsaid="ended with", check=False,
            ),
        ),
    ),
    "whole weights that are reached sometimes": Scene(
        optimized(HARD["SometimesReached"], SHAMPOO), policies={"zero1": 2}, often=(), four=("zero1",),
        steps=6,
    ),
    "whole weights behind a method": Scene(
        optimized(HARD["OwnMethods"], SHAMPOO), policies={"zero1": 2}
    ),
    "a state that is made with the optimizer": Scene(
        optimized(having(Duel, of_judge={"ema": 0.7}), partial(Adagrad, lr=1e-2)), bucket=SMALL,
        policies=dict.fromkeys(("ddp", "zero1", "zero2", "zero3", "zero3+offload", "fsdp", "fsdp+offload"), 2),
        often=("zero3",), saved=("zero3",), arrives=(("fsdp", 2), ("single", 1)),
    ),
    "a gradient that an optimizer keeps": Scene(
        optimized(PLAIN, partial(Optimistic, defaults={"lr": 1e-2})), policies={"ddp": 2, "zero1": 2}, often=("ddp",),
        refused=(
            Refused(CARELESS, "ddp", "has kept the gradient of weight", check=False),
            Refused(CARELESS, "zero1", "backward writes into its", check=False),
        ),
    ),
    "whole weights that are saved": Scene(  # with state that is no tensor, and state in lists
        optimized(having(Duel, of_judge={"ema": 0.7}), SHAMPOO), policies={"zero1": 2}, often=("zero1",),
        bucket=64, saved=("zero1",), arrives=(("ddp", 2), ("single", 1), ("zero1", 4)),
    ),
}  # fmt: skip
