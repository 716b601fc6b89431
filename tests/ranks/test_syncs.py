"""A training step waits for the device once a phase: see tests/support/rehearsal/syncs.py."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gan import GanModule, Phase, Player
from nets.ada import Augmentation
from nets.blocks import onehot
from strategies import PhaseStrategy
from tests.support.hard_games import Plain, mlp
from tests.support.parity import Whole, in_buckets, often, trainer
from tests.support.rehearsal.syncs import BETWEEN, counted
from tests.support.scene import SMALL

PHASES = ["discriminator", "generator", "both"]


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


def count(game: Callable[[], GanModule], policy: str, world: int) -> dict[str, list[str]]:
    """For each phase, the host syncs of the play that had most."""
    loader = Whole(8, dist.get_rank() if world > 1 else 0, world)
    with counted() as syncs:
        trainer(PhaseStrategy(policy, check=False), world, 4).fit(game(), loader)
    return syncs.most(after=3)


def played(ranks: Any, game: Callable[[], GanModule], policy: str) -> dict[str, list[str]]:
    if policy == "single":
        return in_buckets(SMALL, count, game, policy, 1)
    return ranks(2).run(in_buckets, SMALL, count, game, policy, 2)[0]


ONCE = ["single", "ddp", "zero1", "zero2", "zero3", "fsdp"]


@pytest.mark.parametrize("policy", often(ONCE, these=("single", "zero3")))
def test_a_phase_waits_once_for_all_learners_and_a_step_never_between_phases(ranks: Any, policy: str) -> None:
    found = played(ranks, Watched, policy)
    assert found.keys() == {*PHASES, BETWEEN}
    for name in PHASES:
        assert len(found[name]) == 1 and "gan/later.py" in found[name][0], found
    assert found[BETWEEN] == []


@pytest.mark.slow
def test_a_pipeline_waits_once_more_in_each_call(ranks: Any) -> None:
    """Ranks compare their calls before they send anything."""
    found = played(ranks, Watched, "generator=pipeline,*=ddp")
    assert [len(found[name]) for name in PHASES] == [2, 2, 2] and found[BETWEEN] == [], found


@pytest.mark.slow
def test_offload_waits_for_its_copies_too(ranks: Any) -> None:
    """The CPU steps in its own memory, so it waits for each bucket of weights and gradients that is moved."""
    found = played(ranks, Watched, "zero3+offload")
    for name in PHASES:
        assert len([each for each in found[name] if "later.py" in each]) == 1
        assert all(each.startswith(("tolist", "to ", "copy_")) for each in found[name]), found


class Labels(Watched):
    """A label map is checked on the device."""

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        planes = onehot((batch["x"][:, :4] > 0).long().view(-1, 2, 2), 2, batch["x"])
        return super().fool(batch) * planes.mean()


def test_a_label_map_costs_no_wait_of_its_own(ranks: Any) -> None:
    found = played(ranks, Labels, "single")
    assert [len(found[name]) for name in PHASES] == [1, 1, 1], found


class Augmented(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.changed = Augmentation("bgcfnc", p=0.8)

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        pictures = batch["x"][:, :3].tanh()[:, :, None, None].expand(-1, -1, 8, 8)
        return super().fool(batch) + self.changed(pictures).mean()


def test_an_augmentation_waits_once_for_how_far_pictures_are_moved(ranks: Any) -> None:
    found = played(ranks, Augmented, "single")
    (margins,) = [each for each in found["generator"] if "nets/ada.py" in each]
    assert margins.startswith("tolist") and len(found["generator"]) == 2, found


# ---- controls ----


class Doing(Watched):
    """Does things beside in one of its losses."""

    def __init__(self, things: list[Callable[[Tensor, Tensor], Any]]) -> None:
        super().__init__()
        self.things = things

    def fool(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().fool(batch)
        for thing in self.things:
            thing(loss.detach(), batch["x"])
        return loss


WAITS = [
    lambda loss, x: loss.item(),
    lambda loss, x: bool(loss > 0),
    lambda loss, x: x.tolist(),
    lambda loss, x: x.numpy(),
    lambda loss, x: x.cpu(),
    lambda loss, x: x.to("cpu"),
    lambda loss, x: torch.equal(x, x + 1),
    lambda loss, x: x.nonzero(),
    lambda loss, x: x[x > 0],
    lambda loss, x: x.clone().__setitem__(torch.ones_like(x).bool(), x.flatten()),
    lambda loss, x: x.long().unique(),
    lambda loss, x: x.repeat_interleave(torch.ones(len(x), device=x.device).long(), 0),
    lambda loss, x: torch.tensor([1.0, 2.0], device=x.device),
    lambda loss, x: x[[0, 1]],
    lambda loss, x: torch.zeros(3).to(x.device),
    lambda loss, x: torch.zeros_like(x).copy_(torch.zeros(x.shape)),
]
WAITS_NOT = [
    lambda loss, x: (x.to("cpu", non_blocking=True), torch.zeros(3).to(x.device, non_blocking=True)),
    lambda loss, x: (torch.zeros(()).item(), torch.tensor([1, 2]).tolist(), torch.arange(3).nonzero()),
    lambda loss, x: (torch.zeros(3, device=x.device), torch.full((2,), 7.0, device=x.device), x.new_ones(2)),
    lambda loss, x: x.clone().masked_fill_(x > 0, 1.0),
    lambda loss, x: x.to(x.device, torch.float32),
]


def test_the_control_what_waits_is_counted_once_where_it_is(ranks: Any) -> None:
    found = played(ranks, partial(Doing, WAITS), "single")["generator"]
    lines = [int(line) for each in found for line in re.findall(r"tests/ranks/test_syncs.py:(\d+) ", each)]
    assert lines == [thing.__code__.co_firstlineno for thing in WAITS], found
    assert len(found) == len(WAITS) + 1


def test_what_does_not_wait_is_not_counted(ranks: Any) -> None:
    found = played(ranks, partial(Doing, WAITS_NOT), "single")["generator"]
    assert len(found) == 1, found
