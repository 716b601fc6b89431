"""Games that dice make: networks of odd layers with several heads, and phases that make use of some of them."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import StepLR

from gan import GanModule, Phase, Player, noise, ranks
from nets.norm import SyncBatchNorm

WIDTH = 8

# Each tells a gradient of zeros from none. A large eps, because Adam divides rounding by rounding.
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "SGD": partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.02),
    "AdamW": partial(AdamW, lr=1e-2, eps=1e-2, weight_decay=0.1),
    "amsgrad": partial(Adam, lr=1e-2, eps=1e-2, betas=(0.5, 0.9), amsgrad=True),
    "RMSprop": partial(RMSprop, lr=1e-2, eps=0.1, momentum=0.5),
}
PLAIN = ("ddp", "zero1", "zero2", "zero3", "fsdp", "zero3+offload", "zero2+recompute", "zero3+recompute")
STAGED = tuple(
    f"pipeline{options}"
    for options in ("", "+chunks:1", "+chunks:2+recompute", "+chunks:4+schedule:1f1b", "+schedule:interleaved")
)


class Odd(nn.Module):
    """A layer of some kind, of as many features as it gets."""

    KINDS = (
        "plain", "residual", "spectral", "norm", "noisy", "dropout", "mean", "counter", "chosen", "stopped", "frozen",
        "unused", "embedded", "own gradient", "no gradient",
    )  # fmt: skip

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, 0
        self.layer = nn.Linear(WIDTH, WIDTH, bias=kind != "norm")
        if kind == "spectral":
            self.layer = spectral_norm(self.layer)
        if kind == "norm":
            self.norm = SyncBatchNorm(WIDTH)
        if kind == "mean":
            self.register_buffer("center", torch.zeros(WIDTH))
        if kind == "frozen":
            self.layer.requires_grad_(False)
        if kind in ("unused", "chosen"):
            self.other = nn.Linear(WIDTH, WIDTH)
        if kind == "embedded":
            self.table = nn.Embedding(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        match self.kind:
            case "residual":
                return x + self.layer(x).tanh()
            case "norm":
                return self.norm(self.layer(x)).tanh()
            case "noisy":
                return self.layer(x + 0.1 * torch.randn_like(x)).tanh()
            case "dropout":
                return nn.functional.dropout(self.layer(x), 0.2, self.training).tanh()
            case "mean":
                if self.training:
                    self.center = 0.9 * self.center + 0.1 * ranks.mean(x.detach().mean(0))
                return self.layer(x - self.center).tanh()
            case "counter":
                self.calls += 1
                return self.layer(x).tanh() * (1 + 0.1 * self.calls)
            case "chosen":
                return torch.where(x[:, :1] > 0, self.layer(x), self.other(x)).tanh()
            case "stopped":
                return x.detach() + self.layer(x.detach()).tanh()
            case "embedded":
                return self.layer(x).tanh() + self.table((x[:, 0] > 0).long())
            case "own gradient":
                return Scaled.apply(self.layer(x).tanh(), 0.5)
            case "no gradient":
                return x + Scaled.apply(self.layer(x).tanh(), None)
        return self.layer(x).tanh()


class Scaled(torch.autograd.Function):
    """Gives back a part of the gradient, or none."""

    @staticmethod
    def forward(ctx, x: Tensor, part: float | None) -> Tensor:
        ctx.part = part
        return x.clone()

    @staticmethod
    def backward(ctx, slope: Tensor) -> tuple[Tensor | None, None]:
        return None if ctx.part is None else slope * ctx.part, None


class OddNet(nn.Module):
    """Odd layers one after the other, with skips, and heads that read what some of them return."""

    def __init__(self, chance: Random, inside: int, outside: int) -> None:
        super().__init__()
        self.start = nn.Linear(inside, WIDTH)
        self.layers = nn.ModuleList(Odd(chance.choice(Odd.KINDS)) for _ in range(chance.randint(2, 5)))
        count = len(self.layers)
        self.skips = [chance.choice([None, *range(number + 1)]) for number in range(count)]
        self.taps = [count, *(chance.randrange(count + 1) for _ in range(chance.randrange(3)))]
        self.heads = nn.ModuleList(nn.Linear(WIDTH, outside) for _ in self.taps)
        self.twice = chance.random() < 0.05  # the first layer comes again
        self.named = chance.random() < 0.5

    def forward(self, x: Tensor) -> list[Tensor] | dict[str, Tensor]:
        seen = [self.start(x).tanh()]
        for layer, skip in zip(self.layers, self.skips, strict=True):
            now = layer(seen[-1])
            seen.append(now if skip is None else now + 0.5 * seen[skip])
        seen[-1] = self.layers[0](seen[-1]) if self.twice else seen[-1]
        found = [head(seen[tap]) for head, tap in zip(self.heads, self.taps, strict=True)]
        return {f"head {number}": each for number, each in enumerate(found)} if self.named else found


class RandomGame(GanModule):
    """What the dice of a seed have made. It is the same in each process."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance = chance = Random(seed)
        torch.manual_seed(seed)
        self.generator, self.discriminator = OddNet(chance, 4, 6), OddNet(chance, 6, 1)
        self.encoder = OddNet(chance, 6, 4) if chance.random() < 0.4 else None
        self.follows, self.teacher = chance.random() < 0.5, None
        if chance.random() < 0.4:
            self.teacher = deepcopy(self.generator) if self.follows else OddNet(chance, 4, 6)
        self.shares, self.turns, self.contrasts = (chance.random() < share for share in (0.4, 0.4, 0.2))
        self.described = list(self._players()), list(self._phases())

    def configure_players(self) -> list[Player]:
        return self.described[0]

    def configure_phases(self) -> list[Phase]:
        return self.described[1]

    def _players(self) -> Iterator[Player]:
        chance = self.chance
        for name in ("generator", "discriminator", "encoder"):
            if getattr(self, name) is not None:
                yield Player(
                    name,
                    getattr(self, name),
                    OPTIMIZERS[chance.choice(list(OPTIMIZERS))],
                    schedule=chance.choice((None, partial(StepLR, step_size=2, gamma=0.5))),
                    ema=chance.choice((None, 0.8)),
                    clip=chance.choice((None, 0.05)),
                    freeze=chance.choice((None, None, thaws)),
                    after=chance.choice((None, None, clamps)),
                )
        if self.teacher is not None:
            following = {"follows": "generator", "ema": 0.9, "ema_buffers": chance.choice(("copied", "averaged"))}
            yield Player("teacher", self.teacher, **following if self.follows else {})

    def _phases(self) -> Iterator[Phase]:
        yield self._phase("judge", self.judge, "discriminator")
        if self.chance.random() < 0.3:
            yield Phase("penalise", self.penalise, "discriminator", every=2, second_order=True)
        makers = ("generator", "encoder") if self.encoder is not None and self.chance.random() < 0.5 else "generator"
        yield self._phase("fool", self.fool, makers)
        if self.encoder is not None:
            yield self._phase("rebuild", self.rebuild, self.chance.choice(("encoder", ("encoder", "generator"))))

    def _phase(self, name: str, loss: Callable[..., Any], learners: Any) -> Phase:
        chance = self.chance
        every, micro_batches = chance.choice((1, 1, 2)), 1 if self.shares else chance.choice((1, 1, 2))
        return Phase(name, loss, learners, every=every, start=chance.choice((0, 0, 1)), micro_batches=micro_batches)

    # ---- losses ----

    def heads(self, network: nn.Module, x: Tensor, number: int = 0) -> Tensor:
        """One of what a network returns, in some games another one in each step."""
        found = network(x)
        heads = list(found.values()) if isinstance(found, dict) else found
        return heads[(number + self.step * self.turns) % len(heads)]

    def codes(self, real: Tensor) -> Tensor:
        z = noise.randn((len(real), 4), like=real)
        return z if self.encoder is None else z + self.heads(self.encoder, real, 1)

    def draw(self, real: Tensor) -> Tensor:
        return self.heads(self.generator, self.codes(real))

    def fake(self, real: Tensor) -> Tensor:
        return self.shared("fake", self.draw, real) if self.shares else self.draw(real)

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        real, fake = batch["x"], self.fake(batch["x"]).detach()
        return {
            "real": softplus(-self.heads(self.discriminator, real)).mean(),
            "fake": softplus(self.heads(self.discriminator, fake)).mean(),
        }

    def penalise(self, batch: dict[str, Tensor]) -> Tensor:
        real = batch["x"].clone().requires_grad_()
        score = self.heads(self.discriminator, real, 1)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True, materialize_grads=True)
        return 0.1 * slope.square().sum(1).mean() + score.square().mean()

    def rebuild(self, batch: dict[str, Tensor]) -> Tensor:
        code = self.heads(self.encoder, batch["x"])
        return (self.heads(self.generator, code, 1) - batch["x"]).abs().mean()

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        fake = self.fake(batch["x"])
        losses = {"fool": softplus(-self.heads(self.discriminator, fake, 1)).mean()}
        if self.teacher is not None:
            z = noise.randn((len(fake), 4), like=fake)
            losses["taught"] = (self.heads(self.generator, z) - self.heads(self.teacher, z)).square().mean()
        if self.contrasts:
            others = ranks.gather(fake)
            losses["contrast"] = (others @ others.T).logsumexp(1).mean()
        return losses


def thaws(step: int) -> list[str]:
    return ["layers.0"] if step < 2 else []


def clamps(network: nn.Module) -> None:
    with torch.no_grad():
        for weight in network.parameters():
            weight.clamp_(-0.8, 0.8)


def placement(chance: Random) -> str:
    """Where the players of a game are."""
    return ",".join(f"{name}={chance.choice(PLAIN + STAGED)}" for name in ("generator", "discriminator", "*"))
