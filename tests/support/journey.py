"""A training in legs, each under another policy at another number of ranks, from checkpoint to checkpoint."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gan import Player
from tests.support.duel import fit
from tests.support.hard_games import OwnMethods, SometimesReached, by_shape
from tests.support.parity import on

OURS = {"single": 1, "ddp": 2, "zero1": 2, "zero2": 2, "zero3": 4, "fsdp": 2, "generator=zero3,*=zero1": 2}
LEGS = {**OURS, "deepspeed1": 2, "deepspeed2": 2, "deepspeed3": 2}  # and the ranks that each is travelled with


class Journey(OwnMethods, SometimesReached):
    """Weights out of reach, frozen weights, an average, a clip, a schedule, and groups of weights."""

    def configure_players(self) -> Iterator[Player]:
        generator, discriminator = super().configure_players()
        yield generator
        yield replace(discriminator, optimizer=by_shape, ema=0.7)


def leg(policy: str, world: int, steps: int, **checkpoints: str | None) -> dict[str, Any]:
    """Some steps of a journey under some policy at some number of ranks."""
    return fit(Journey, policy, world, steps, size=2**20, **checkpoints)


def travel(ranks: Any, policy: str, steps: int, **where: str) -> dict[str, Any]:
    """A leg, as the first rank has seen it."""
    world = LEGS[policy]
    return on(ranks, world)(leg, policy, world, steps, **where)[0]
