"""A training step waits for the device once a phase: see tests/support/rehearsal/syncs.py."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from gan import GanModule, Phase, Player
from strategies import PhaseStrategy
from tests.support.hard_games import Plain, mlp
from tests.support.parity import Whole, in_buckets, often, trainer
from tests.support.rehearsal.syncs import counted

SMALL = 64  # bytes of a bucket: every weight has one of its own


class Watched(Plain):
    """Clips, averages, a schedule, noise; a phase of two learners; and a layer that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))
        self.discriminator = nn.ModuleDict({"read": mlp(6, 1), "spare": nn.Linear(3, 3)})

    def configure_players(self) -> Iterator[Player]:
        generator, discriminator = super().configure_players()
        yield generator
        yield replace(discriminator, ema=0.9, after=lambda network: network["read"][0].bias.clamp_(-1, 1))

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("discriminator", self.judge, "discriminator")
        yield Phase("generator", self.fool, "generator")
        yield Phase("both", self.both, ("generator", "discriminator"))

    def judge(self, batch: dict[str, Tensor]) -> Tensor:
        read = self.discriminator["read"]
        return (read(self.fake(batch["x"]).detach()).tanh() - read(batch["x"]).tanh()).mean()

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        return -self.discriminator["read"](self.fake(batch["x"])).mean()

    def both(self, batch: dict[str, Tensor]) -> Tensor:
        return self.discriminator["read"](self.fake(batch["x"])).square().mean()


class Reading(Watched):
    """The control: a loss that reads a value."""

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().fool(batch)
        return loss / abs(loss.item())


def count(game: type[GanModule], policy: str, world: int) -> dict[str, list[str]]:
    """For each phase, the host syncs of the play that had most."""
    several = world > 1 and policy != "dp"
    loader = Whole(8, dist.get_rank() if several else 0, world if several else 1)
    with counted() as syncs:
        trainer(PhaseStrategy(policy, check=False), world, 6).fit(game(), loader)
    return syncs.most(after=3)


def played(ranks: Any, game: type[GanModule], policy: str, world: int = 2) -> dict[str, list[str]]:
    if policy in ("single", "dp"):
        return in_buckets(SMALL, count, game, policy, 1 if policy == "single" else world)
    return ranks(world).run(in_buckets, SMALL, count, game, policy, world)[0]


POLICIES = ["single", "ddp", "zero1", "zero2", "zero3", "fsdp", "dp", "zero3+offload", "generator=pipeline,*=ddp"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_phase_waits_once(ranks: Any, policy: str) -> None:
    found = played(ranks, Watched, policy)
    print()
    for name, each in found.items():
        print(policy, name, len(each), *[f"\n      {s}" for s in each])
