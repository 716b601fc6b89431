"""Games with frozen teachers, which other ranks may serve."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import SGD, Adam

from gan import GanModule, Phase, Player, noise, ranks
from tests.support.hard_games import mlp

WIDTH = 8


@dataclass
class Seen:
    """What the teacher returns: no container that torch knows."""

    score: Tensor
    levels: list[Tensor]
    count: int


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.5 * self.outer(torch.tanh(self.inner(x)))


class Teacher(nn.Module):
    """Draws noise, has a method of its own, and asks for the mode of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(6, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.end = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("shift", torch.linspace(-0.5, 0.5, WIDTH))
        self.strength = 0.5

    def forward(self, x: Tensor, *, strengths: dict[str, float]) -> Seen:
        levels = [self.start(x) + self.shift * torch.tensor(0.1)]  # in torch's default precision
        for block in self.blocks:
            levels.append(block(levels[-1]))
        last = self.norm(levels[-1]) + strengths["noise"] * noise.randn(levels[-1].shape, like=x)
        last = nn.functional.dropout(last, strengths["noise"])
        strength = self.strength if self.end.training else 2 * self.strength
        return Seen(self.end(last) * (1 + strength * strengths["step"]), levels[1:], len(levels))

    def features(self, x: Tensor, level: int = 1) -> Tensor:
        for block in self.blocks[:level]:
            x = block(x)
        return x


class Distil(GanModule):
    """A generator that learns from a judge, and through a frozen teacher, in every way that a game may call one.

    Without `folder` the teachers' weights are those of the constructor; else they come from files there.
    """

    micro_batches = 2
    by_parts = twice = True
    teacher_of = Teacher

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.generator, self.judge = mlp(6, 6), mlp(6, 1)
        self.teacher, self.eye = self.teacher_of(), mlp(6, 4)
        self.folder = folder

    def configure_players(self) -> Iterator[Player]:
        files = {name: f"{self.folder}/{name}.safetensors" if self.folder else None for name in ("teacher", "eye")}
        yield Player("generator", self.generator, partial(Adam, lr=1e-2, betas=(0.5, 0.9)), ema=0.9, clip=1.0)
        yield Player("judge", self.judge, partial(SGD, lr=5e-2))
        yield Player("teacher", self.teacher, blocks=["blocks.0", "blocks.1", "blocks.2"], weights=files["teacher"])
        yield Player("eye", self.eye, weights=files["eye"])

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("judge", self.tell, "judge", micro_batches=self.micro_batches)
        yield Phase("generator", self.fool, "generator", micro_batches=self.micro_batches)

    def fake(self, batch: dict[str, Tensor]) -> Tensor:
        return self.generator(batch["x"] + noise.randn(batch["x"].shape, like=batch["x"]))

    def seen(self, x: Tensor, strength: float) -> Seen:
        self.teacher.end.train(self.step % 2 == 1)
        found = self.teacher(x, strengths={"noise": strength, "step": 0.04 * self.step})
        return found if isinstance(found, Seen) else Seen(*found)

    def tell(self, batch: dict[str, Tensor]) -> Tensor:
        """Without gradients through a teacher; and with those of an earlier phase's graph in the next one."""
        fake = self.shared("fake", self.fake, batch)
        real, made = self.judge(batch["x"]), self.judge(fake.detach())
        with torch.no_grad():
            wanted = self.seen(batch["x"], 0.1).score
        return softplus(-real).mean() + softplus(made).mean() + (real - wanted).square().mean()

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Two backwards through one call, a method, a part of the network, a number and a mode of every step."""
        fake = self.shared("fake", self.fake, batch)
        found = self.seen(fake, 0.2)
        seen = found.score.square().mean() + sum(level.mean() for level in found.levels) / found.count
        parts = self.teacher.features(self.teacher.start(fake), level=2) if self.by_parts else found.levels[1]
        if self.by_parts and self.teacher.features(fake, level=0) is not fake:  # as some games ask
            parts = 2 * parts
        if self.twice:
            last = list(self.generator.parameters())[-1]
            slope = ranks.mean(torch.autograd.grad(seen, last, retain_graph=True)[0])
            seen = seen * (1 + 0.1 * slope.square().sum())
        same = (self.eye(fake) - self.eye(batch["x"]).detach()).abs().mean()
        return {
            "fool": softplus(-self.judge(fake)).mean(),
            "seen": seen,
            "parts": 0.1 * parts.square().mean() + same,
        }

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        self.log("score", self.seen(self.generator(batch["x"]), 0.0).score.mean(), sync_dist=True)


def write(folder: Path) -> None:
    """The weights of the constructor's teachers, as files."""
    game = Distil()
    for name in ("teacher", "eye"):
        network = getattr(game, name).double()
        save_file(network.state_dict(), folder / f"{name}.safetensors")


class Plain(Teacher):
    """Returns what a pipeline can return."""

    def forward(self, x: Tensor, *, strengths: dict[str, float]) -> tuple[Tensor, list[Tensor], int]:
        seen = super().forward(x, strengths=strengths)
        return seen.score, seen.levels, seen.count


class AsAWhole(Distil):
    """Calls the teacher as a whole, and goes back once through each call: what a pipeline can do."""

    teacher_of = Plain
    by_parts = twice = False
