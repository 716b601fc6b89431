"""A training in legs, each under another policy at another number of ranks, from checkpoint to checkpoint."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch.distributed as dist

from gan import Player
from strategies import PhaseStrategy
from tests.support.doubled import doubled
from tests.support.hard_games import OwnMethods, SometimesReached, by_shape
from tests.support.parity import Whole, snapshot, trainer

OURS = {"single": 1, "ddp": 2, "zero1": 4, "zero2": 2, "zero3": 4, "fsdp": 2, "generator=zero3,*=zero1": 2}
LEGS = {**OURS, "deepspeed1": 2, "deepspeed2": 2, "deepspeed3": 2}  # and the ranks that each is travelled with


class Journey(OwnMethods, SometimesReached):
    """Weights out of reach, frozen weights, an average, a clip, a schedule, and groups of weights."""

    def configure_players(self) -> Iterator[Player]:
        generator, discriminator = super().configure_players()
        yield generator
        yield replace(discriminator, optimizer=by_shape, ema=0.7)


def leg(
    policy: str, world: int, steps: int, save: str | None = None, resume: str | None = None, **settings: Any
) -> dict[str, Any]:
    """Some steps of a journey under some policy at some number of ranks."""
    rank = dist.get_rank() if world > 1 else 0
    module, strategy = Journey(), PhaseStrategy(policy, check=False)
    made = trainer(strategy, world, steps, **settings)
    with doubled() if "deepspeed" in policy else nullcontext(), mock.patch.dict(os.environ, PL_GLOBAL_SEED="3"):
        made.fit(module, Whole(8, rank, world), ckpt_path=resume)
        if save is not None:
            made.save_checkpoint(save)
    return snapshot(module, strategy)


def travel(ranks: Any, policy: str, steps: int, **where: str) -> dict[str, Any]:
    """A leg, as the first rank has seen it."""
    world = LEGS[policy]
    return leg(policy, 1, steps, **where) if world == 1 else ranks(world).run(leg, policy, world, steps, **where)[0]
