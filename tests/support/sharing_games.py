"""Games whose players share frozen parameters, and the same training as a loop by hand."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam

from gan import GanModule, Phase, Player
from gan.ema import Ema
from nets.lora import LowRank, adapted
from tests.support.hard_games import mlp
from tests.support.parity import STEPS, vectors

adam = partial(Adam, lr=1e-2, betas=(0.5, 0.9))
CLIP, DECAY, EVERY = 0.2, 0.8, 2


class Layer(nn.Linear):
    """A linear layer with an adapter for each of several players: some in a dict of their own, some directly here."""

    def __init__(self, inside: int, outside: int, *players: str) -> None:
        super().__init__(inside, outside)
        self.down = nn.ParameterDict({name: torch.randn(2, inside) / 2 for name in players})
        for name in players:
            self.register_parameter(f"up_{name}", nn.Parameter(torch.randn(outside, 2) / 4))

    def forward(self, x: Tensor, player: str | None = None) -> Tensor:
        y = super().forward(x)
        return y if player is None else y + x @ self.down[player].T @ getattr(self, f"up_{player}").T

    def of(self, player: str) -> list[nn.Parameter]:
        return [self.down[player], getattr(self, f"up_{player}")]


class Base(nn.Module):
    """A network of such layers."""

    def __init__(self, *players: str) -> None:
        super().__init__()
        self.first, self.second, self.third = (Layer(6, 6, *players) for _ in range(3))
        self.scale = nn.Parameter(torch.full((6,), 0.9))

    def forward(self, x: Tensor, player: str | None = None) -> Tensor:
        x = torch.tanh(self.first(x, player)) * self.scale
        return self.third(torch.tanh(self.second(x, player)), player)

    def own(self) -> list[nn.Parameter]:
        return [self.scale, *(each for layer in self.layers() for each in (layer.weight, layer.bias))]

    def layers(self) -> list[Layer]:
        return [self.first, self.second, self.third]

    def adapters(self, player: str) -> list[nn.Parameter]:
        return [each for layer in self.layers() for each in layer.of(player)]


Net = Callable[[Tensor], Tensor]


def guiding(student: Net, fake: Net, x: Tensor) -> Tensor:
    """The fake score learns what the student draws."""
    with torch.no_grad():
        drawn = student(x)
    return (fake(drawn + x) - drawn).square().mean()


def distilling(student: Net, fake: Net, teacher: Net, x: Tensor) -> Tensor:
    """The student learns from the difference of two scores; and, as a gradient penalty, to be smooth."""
    x = x.detach().requires_grad_()
    drawn = student(x)
    (slope,) = torch.autograd.grad(drawn.sum(), x, create_graph=True)
    with torch.no_grad():
        direction = teacher(drawn + x) - fake(drawn + x)
    return (drawn * -direction).mean() + teacher(drawn).square().mean() + 0.1 * slope.square().mean()


class Distilled(GanModule):
    """The phases, for any `student`, `fake` and `teacher`."""

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("guide", self.guide, "fake", micro_batches=2)
        yield Phase("distil", self.distil, "student", every=EVERY, second_order=True)

    def guide(self, batch: dict[str, Tensor]) -> Tensor:
        return guiding(self.student, self.fake, batch["x"])

    def distil(self, batch: dict[str, Tensor]) -> Tensor:
        return distilling(self.student, self.fake, self.teacher, batch["x"])


class Adapters(Distilled):
    """Two players are adapters inside a base, which is frozen, and the teacher. Their lists are not in the game."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = Base("student", "fake")

    def student(self, x: Tensor) -> Tensor:
        return self.base(x, "student")

    def fake(self, x: Tensor) -> Tensor:
        return self.base(x, "fake")

    def teacher(self, x: Tensor) -> Tensor:
        return self.base(x)

    def configure_players(self) -> Iterator[Player]:
        yield Player("student", nn.ParameterList(self.base.adapters("student")), adam, ema=DECAY, clip=CLIP)
        named = {f"part_{k}": each for k, each in enumerate(self.base.adapters("fake"))}
        yield Player("fake", nn.ParameterDict(named), adam)
        yield Player("teacher", self.base)


def limit(network: nn.Module) -> None:
    """For `Player(after=...)`: reads the base's weights, and writes those of the adapters."""
    for layer in network.modules():
        if isinstance(layer, LowRank):
            most = layer.layer.weight.abs().mean() / 4
            layer.up.weight.clamp_(-most, most)


class SharedBase(Distilled):
    """The same with networks as players: each has the frozen base, and adapters of its own."""

    after: Any = staticmethod(limit)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.teacher = nn.Sequential(mlp(6, 6), nn.Tanh(), nn.Linear(6, 6)).requires_grad_(False)
        self.student, self.fake = adapted(self.teacher, 2), adapted(self.teacher, 3)

    def configure_players(self) -> Iterator[Player]:
        yield Player("student", self.student, adam, ema=DECAY, clip=CLIP, after=self.after)
        yield Player("fake", self.fake, adam)
        yield Player("teacher", self.teacher)


class OneModule(Distilled):
    """A learner and its teacher are the same module, whose adapters the teacher does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.fake = Base("student"), mlp(6, 6)
        for parameter in self.base.own():
            parameter.requires_grad_(False)

    def student(self, x: Tensor) -> Tensor:
        return self.base(x, "student")

    def teacher(self, x: Tensor) -> Tensor:
        return self.base(x)

    def configure_players(self) -> Iterator[Player]:
        yield Player("teacher", self.base)
        yield Player("fake", self.fake, adam)
        yield Player("student", self.base, adam, ema=DECAY, clip=CLIP)


class FollowingAdapters(SharedBase):
    """The fake score is the moving average of the student; they share the base."""

    after = None

    def __init__(self) -> None:
        super().__init__()
        shared = {id(parameter): parameter for parameter in self.teacher.parameters()}
        self.fake = copy.deepcopy(self.student, shared)

    def configure_players(self) -> Iterator[Player]:
        yield Player("fake", self.fake, follows="student", ema=DECAY)
        yield Player("student", self.student, adam, clip=CLIP)
        yield Player("teacher", self.teacher)

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("distil", self.distil, "student", second_order=True)


def by_hand(game: Distilled, steps: int = STEPS) -> dict[str, Tensor]:
    """`Adapters` or `SharedBase` in plain torch: weights and averages under the names of a snapshot."""
    game.double()
    for parameter in game.parameters():
        parameter.requires_grad_(False)
    players = {player.name: player for player in game.configure_players()}
    learning = {
        name: {key: p for key, p in player.module.named_parameters() if name != "teacher" and _learns(game, key)}
        for name, player in players.items()
    }
    optimizers = {name: adam(weights.values()) for name, weights in learning.items() if weights}
    average = Ema(learning["student"], lambda _: DECAY)
    for step in range(steps):
        x = vectors(step)["x"]
        for name in ("fake", "student"):
            if name == "student" and step % EVERY:
                continue
            for weight in learning[name].values():
                weight.requires_grad_(True)
            loss = game.guide({"x": x}) if name == "fake" else game.distil({"x": x})
            loss.backward()
            if name == "student":
                nn.utils.clip_grad_norm_(learning[name].values(), CLIP)
            optimizers[name].step()
            optimizers[name].zero_grad()
            for weight in learning[name].values():
                weight.requires_grad_(False)
            if players[name].after is not None:
                players[name].after(players[name].module)
            if name == "student":
                average.update()
    found = {f"weight {key}": value.detach().clone() for key, value in game.state_dict().items()}
    return found | {f"ema student.{key}": value for key, value in average.state_dict().items()}


def _learns(game: Distilled, key: str) -> bool:
    return not isinstance(game, SharedBase) or "down" in key or "up" in key


SHARING: dict[str, Any] = {game.__name__: game for game in (Adapters, SharedBase, OneModule)}
