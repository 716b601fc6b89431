"""Games whose weights are written by a forward, each in some way that people write."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from gan import Player, ranks
from tests.support.hard_games import Plain, mlp

WRITES = {
    "copy_": lambda weight, value: weight.copy_(value),
    "data.copy_": lambda weight, value: weight.data.copy_(value),
    "data=": lambda weight, value: setattr(weight, "data", value.clone()),
}


def write(way: str, weight: nn.Parameter, value: Tensor) -> None:
    with torch.no_grad():
        WRITES[way](weight, value)


class ActNorm(nn.Module):
    """Its first batch sets shift and scale (Kingma and Dhariwal 2018)."""

    def __init__(self, way: str, alone: bool) -> None:
        super().__init__()
        self.way, self.alone = way, alone
        self.shift, self.scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))
        self.register_buffer("started", torch.tensor(False))

    def sum(self, x: Tensor) -> Tensor:
        return ranks.sum(x) if ranks.more_than_one() and not self.alone else x

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self.started:
            rows = self.sum(torch.tensor(float(len(x)), dtype=x.dtype))
            mean = self.sum(x.detach().sum(0)) / rows
            spread = (self.sum((x.detach() - mean).square().sum(0)) / rows).sqrt()
            write(self.way, self.shift, -mean)
            write(self.way, self.scale, 1 / spread)
            self.started.fill_(True)
        return (x + self.shift) * self.scale


class Forced(nn.Linear):
    """A layer that writes its weight to length 1 in every forward (Karras et al. 2024)."""

    def __init__(self, inside: int, outside: int, way: str) -> None:
        super().__init__(inside, outside)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            write(self.way, self.weight, self.weight / self.weight.norm(dim=1, keepdim=True))
        return linear(x, self.weight / self.weight.norm(dim=1, keepdim=True), self.bias)


class Writing(Plain):
    """Both: a discriminator that its first batch sets, and a generator with a forced norm."""

    way = "copy_"
    alone = False

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(Forced(4, 8, self.way), nn.Tanh(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(ActNorm(self.way, self.alone), mlp(6, 1))


class WritingData(Writing):
    way = "data.copy_"


class WritingOther(Writing):
    way = "data="


class WritingAlone(Writing):
    """The control: each rank's first batch is its own."""

    alone = True


class WritingFrozen(Writing):
    """What is written belongs to a frozen player."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = ActNorm("data.copy_", alone=False)

    def configure_players(self) -> Iterator[Player]:
        yield from super().configure_players()
        yield Player("teacher", self.teacher.train())

    def judge(self, batch: dict[str, Tensor]) -> Any:
        self.teacher.train()  # a frozen player is in evaluation, where it would write nothing
        return super().judge({"x": self.teacher(batch["x"])})


class WritingLate(Writing):
    """A weight that is written after a forward has used it, and before the backward."""

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().fool(batch)
        write(self.way, self.generator[2].weight, self.generator[2].weight * 2)
        return loss
