"""Small games made to be hard on a strategy, each for one reason."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR

from gan import GanModule, Phase, Player, noise


def mlp(inside: int, outside: int, width: int = 8) -> nn.Sequential:
    """Two layers and an activation that can be differentiated twice."""
    return nn.Sequential(nn.Linear(inside, width), nn.Tanh(), nn.Linear(width, outside))


class One(GanModule):
    """A single player, who plays a single phase. `of_net` and `of_play`: more words of each."""

    of_net: ClassVar[dict[str, Any]] = {}
    of_play: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = mlp(6, 3)

    def configure_players(self) -> Iterator[Player]:
        yield Player("net", self.net, **{"optimizer": partial(Adam, lr=1e-2)} | self.of_net)

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("play", self.play, "net", **self.of_play)

    def play(self, batch: dict[str, Tensor]) -> Tensor:
        return self.net(batch["x"]).square().mean()


class Plain(GanModule):
    """A non-saturating GAN on vectors with everything a player can have: EMA, clip, schedule, noise."""

    every = 1
    micro_batches = 1
    clip = 0.1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.discriminator = mlp(4, 6), mlp(6, 1)

    def configure_players(self) -> Iterator[Player]:
        decay = partial(LambdaLR, lr_lambda=lambda update: 0.9**update)
        yield Player("generator", self.generator, partial(Adam, lr=1e-2, betas=(0.5, 0.9)), decay, 0.8, self.clip)
        yield Player("discriminator", self.discriminator, partial(Adam, lr=2e-2), clip=self.clip)

    def configure_phases(self) -> Iterator[Phase]:
        micro = {"micro_batches": self.micro_batches}
        yield Phase("discriminator", self.judge, "discriminator", **micro)
        yield Phase("generator", self.fool, "generator", every=self.every, **micro)

    def fake(self, real: Tensor) -> Tensor:
        return self.generator(noise.randn((len(real), 4), like=real))

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        real = batch["x"]
        fake = self.fake(real)
        return {
            "fake": softplus(self.discriminator(fake.detach())).mean(),
            "real": softplus(-self.discriminator(real)).mean(),
        }

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        return softplus(-self.discriminator(self.fake(batch["x"]))).mean()


class Every(Plain):
    every = 3


class Micro2(Plain):
    micro_batches = 2


class Micro4(Plain):
    micro_batches = 4


class TwoForwards(Plain):
    """Two forwards of a network with buffers before one backward, as DDP's buffer broadcast cannot bear."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = nn.Sequential(spectral_norm(nn.Linear(6, 8)), nn.Tanh(), spectral_norm(nn.Linear(8, 1)))


class BatchNorms(Plain):
    """Batch norm in both networks, and no bias that it would cancel (its gradient is noise)."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6, bias=False)
        )
        self.discriminator = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


class Penalised(Plain):
    """R1 in the discriminator's turn."""

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("discriminator", self.penalise, "discriminator", second_order=True)
        yield Phase("generator", self.fool, "generator")

    def penalise(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        real = batch["x"].detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(real).sum(), real, create_graph=True)
        return {**self.judge({"x": real}), "r1": slope.square().sum(1).mean()}


class BatchNormPenalty(Penalised, BatchNorms):
    """A gradient penalty through batch norm: its collectives are differentiated twice."""


class SharedLayer(Plain):
    """One layer used twice in its player, by forwards of two of the network's own methods."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = TwoHeads()

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        real = batch["x"]
        return {
            "fake": softplus(self.discriminator.first(self.fake(real).detach())).mean(),
            "real": softplus(-self.discriminator.second(real)).mean(),
        }

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        fake = self.fake(batch["x"])
        return softplus(-self.discriminator.first(fake) - self.discriminator.second(fake)).mean()


class TwoHeads(nn.Module):
    """A trunk, applied twice in each of two methods."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 1), nn.Linear(6, 1)

    def first(self, x: Tensor) -> Tensor:
        return self.left(torch.tanh(self.trunk(torch.tanh(self.trunk(x)))))

    def second(self, x: Tensor) -> Tensor:
        return self.right(torch.tanh(self.trunk(torch.tanh(self.trunk(x)))))


class TwoPhases(SharedLayer):
    """The discriminator learns in two phases, each reaching one head only, and in one with the generator."""

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("left", self.left, "discriminator")
        yield Phase("right", self.right, "discriminator", every=2)
        yield Phase("both", self.both, ("generator", "discriminator"))

    def left(self, batch: dict[str, Tensor]) -> Tensor:
        return softplus(-self.discriminator.first(batch["x"])).mean()

    def right(self, batch: dict[str, Tensor]) -> Tensor:
        return softplus(-self.discriminator.second(batch["x"])).mean()

    def both(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.discriminator.first(self.fake(batch["x"])) - self.discriminator.second(batch["x"])).square().mean()


class SometimesReached(Plain):
    """Layers that the loss reaches for some samples only: on some ranks, in some steps, or nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = nn.ModuleList([mlp(6, 1) for _ in range(4)])

    def score(self, x: Tensor) -> Tensor:
        number = (x[:, 0].detach() > 0).long() + (x[:, 1].detach() > 1.2).long()
        parts = [self.discriminator[k](x[number == k]).sum() for k in number.unique().tolist()]
        return torch.stack(parts).sum() / len(x)

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"real": -self.score(batch["x"]), "fake": self.score(self.fake(batch["x"]).detach()).square()}

    def judge_by_sample(self, batch: dict[str, Tensor]) -> Tensor:
        return -self.score(batch["x"])

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("discriminator", self.judge_by_sample, "discriminator")
        yield Phase("generator", self.fool, "generator")

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        return -self.score(self.fake(batch["x"]))


class Teacher(Plain):
    """A frozen third player, and a fake that both phases share."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def configure_players(self) -> Iterator[Player]:
        yield from super().configure_players()
        yield Player("teacher", self.teacher)

    def judge(self, batch: dict[str, Tensor]) -> Tensor:
        fake = self.shared("fake", self.fake, batch["x"]).detach()
        return (softplus(self.discriminator(fake)) + softplus(-self.discriminator(self.teacher(batch["x"])))).mean()

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        return softplus(-self.discriminator(self.teacher(self.shared("fake", self.fake, batch["x"])))).mean()


class Penalty(Penalised, TwoForwards):
    """R1 through spectral norm. (Not in micro-batches: each would be judged under another estimate of the norm.)"""


class OwnMethods(Plain):
    """A generator that is never called itself, whose method begins with weights of its own, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Synthesis()

    def fake(self, real: Tensor) -> Tensor:
        return self.generator.synthesize(noise.randn((len(real), 4), like=real))


class Synthesis(nn.Module):
    """Weights of every shape, a scalar among them."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.gain = nn.Parameter(torch.randn(3)), nn.Parameter(torch.tensor(0.7))
        self.table = nn.Parameter(torch.randn(3), requires_grad=False)
        self.layers = mlp(7, 6)

    def synthesize(self, z: Tensor) -> Tensor:
        start = self.start * self.gain + self.table
        return self.layers(torch.cat([z, start.expand(len(z), 3)], 1))


class Outdated(Plain):
    """Goes backward through a graph that is older than the weights it reads."""

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.old = self.discriminator(self.shared("fake", self.fake, batch["x"])).mean()
        return super().judge(batch)

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        return self.old


class Groups(Plain):
    """An optimizer whose recipe groups weights by their shapes, and steps by momentum."""

    def configure_players(self) -> Iterator[Player]:
        for player in super().configure_players():
            yield replace(player, optimizer=by_shape, schedule=None)


def by_shape(weights: list[nn.Parameter]) -> SGD:
    """Biases learn faster and do not decay."""
    wide, narrow = [w for w in weights if w.ndim > 1], [w for w in weights if w.ndim == 1]
    return SGD(
        [{"params": narrow, "lr": 2e-2}, {"params": wide, "weight_decay": 0.1}], lr=1e-2, momentum=0.9, nesterov=True
    )


GAMES = (Plain, Every, Micro2, Micro4, TwoForwards, BatchNorms, BatchNormPenalty, SharedLayer, TwoPhases)
GAMES = (*GAMES, SometimesReached, Teacher, Penalty, OwnMethods, Groups)
HARD: dict[str, Any] = {game.__name__: game for game in GAMES}
