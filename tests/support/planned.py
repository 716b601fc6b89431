"""A small distillation, to be weighed and to be planned; and what is planned of a game."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gan import GanModule
from samples.distillation import distillation
from strategies.cost.budget import Budget, Cost
from strategies.cost.tracing import traces
from strategies.policies import POLICIES
from strategies.policies.choice import choices
from strategies.training.assignment import choose
from strategies.world import World

BUCKET = 2 * 2**20  # bytes, so that a small game has several
ROWS, SIDE = 8, 64
STEPS = 3  # that are played; the last one is weighed


def small() -> GanModule:
    torch.manual_seed(0)
    game = distillation(0.02, size=SIDE, patch=8, batch_size=ROWS, width=256, depth=5).game
    game.student_every = 1  # both phases are due in every step
    return game


def pictures(step: int) -> dict[str, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return {"image": torch.rand(ROWS, 3, SIDE, SIDE, generator=generator)}


def planned(
    game: Callable[[], GanModule], policy: Any, world: int, batch: dict[str, Tensor], bucket: int | None = None
) -> Cost:
    """The cost of a game on CPU ranks, with a global batch of these shapes."""
    with mock.patch("strategies.sharding.bucket.SIZE", bucket or 25 * 2**20):
        with torch.device("meta"):
            made = game()
        made.assemble()
        mine = {name: torch.empty(len(t) // world, *t.shape[1:], device="meta") for name, t in batch.items()}
        chosen = choose(choices(policy, POLICIES), made.players)
        world = World(world, 0, torch.device("cpu"), world)
        return Budget(made, world, lambda recompute: traces(made, mine, recompute)).cost(chosen)


def payload(cost: Cost) -> dict[str, dict[str, float]]:
    """The payload of each kind of collective, in each phase."""
    found: dict[str, dict[str, float]] = {}
    for phase in cost.phases:
        sums = found.setdefault(phase.phase, {})
        for each in (one for player in phase.collectives.values() for one in player):
            sums[each.kind] = sums.get(each.kind, 0) + each.payload
    return found
