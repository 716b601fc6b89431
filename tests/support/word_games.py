"""Games for the matrix that use several words of Player and Phase at once."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from gan import Phase, Player
from tests.support.hard_games import Plain
from tests.support.matrix_optimizers import MuonAndAdam
from tests.support.schedule_free import ScheduleFree


def on_odd_rank() -> bool:
    """Something in which ranks differ: the processes of a world."""
    return dist.is_initialized() and dist.get_rank() % 2 == 1


def limit(network: nn.Module) -> None:
    """Weight clipping; and a layer that is written as a whole."""
    network[0].weight.clamp_(-0.3, 0.3)
    network[2].weight.data = network[2].weight / network[2].weight.norm()


class Turns(Plain):
    """`start`, `until`, `every` and `when`; and `freeze` and `after` of players with a clip and an average.

    `when` counts the turns so far, in a buffer, and other ranks than the first would say the opposite.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turns", torch.zeros(()))

    def configure_players(self) -> Iterator[Player]:
        generator, discriminator = super().configure_players()
        yield replace(generator, freeze=lambda step: "2" if step < 4 else ())
        yield replace(
            discriminator, freeze=lambda step: ["0"] if step in (2, 3, 6) else [], after=limit, ema=0.7, clip=0.05
        )

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("discriminator", self.judge, "discriminator", until=9, when=self.wanted)
        yield Phase("generator", self.fool, "generator", start=1, every=2)
        yield Phase("both", self.both, ("generator", "discriminator"), start=4, until=6)

    def wanted(self) -> bool:
        return (self.turns % 3 < 2).item() != on_odd_rank()

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.turns += 1
        return super().judge(batch)

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        self.turns += 1
        return super().fool(batch)

    def both(self, batch: dict[str, Tensor]) -> Tensor:
        self.turns += 1
        return self.discriminator(self.fake(batch["x"])).square().mean()


EPOCH = 4  # steps of an epoch, for `schedule_per`


def warm(updates: int) -> float:
    return min(0.8, (1 + updates) / (10 + updates))


class Followed(Plain):
    """`follows`, averages by a function, and what averages and schedules count: updates, steps, epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.slow = copy.deepcopy(self.discriminator), copy.deepcopy(self.generator)

    def configure_players(self) -> Iterator[Player]:
        generator, discriminator = super().configure_players()
        falling = partial(LambdaLR, lr_lambda=lambda number: 0.8**number)
        yield replace(generator, schedule=falling, schedule_per="epoch", ema=warm, ema_per="step")
        yield replace(discriminator, schedule=falling, schedule_per="step", ema=warm)
        yield Player("teacher", self.teacher, follows="discriminator", ema=warm)
        yield Player("slow", self.slow, follows="generator", ema=0.8, ema_per="step")

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("discriminator", self.judge, "discriminator")
        yield Phase("generator", self.fool, "generator", every=2)
        yield Phase("again", self.judge, "discriminator", every=3)

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        x = batch["x"]
        taught = (self.discriminator(x) - self.teacher(self.slow(x[:, :4]))).square().mean()
        return {**super().judge(batch), "taught": taught}

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        fake = self.fake(batch["x"])
        return super().fool(batch) + self.teacher(fake).square().mean()


class WholeWeights(Plain):
    """An optimizer that looks at whole weights, and a schedule-free one."""

    def configure_players(self) -> Iterator[Player]:
        generator, discriminator = super().configure_players()
        yield replace(generator, optimizer=partial(MuonAndAdam, lr=1e-2))
        yield replace(discriminator, optimizer=ScheduleFree)


WORDS: dict[str, Any] = {game.__name__: game for game in (Turns, Followed, WholeWeights)}
