"""What `gan.plan` says of a cell, beside what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gan.bench.grid.cells import Cell
from gan.bench.grid.worker import cut_phases
from gan.errors import UserError
from gan.plan.opening import opened
from gan.runs import build
from gan.runs.run import Run
from strategies import private
from strategies.assignment import choose
from strategies.choice import choices
from strategies.cost.budget import Budget
from strategies.policies import POLICIES
from strategies.policies.world import World


@dataclass(frozen=True)
class Planned:
    """The bytes of a rank at its peak, and those that it gives to collectives and messages in a step."""

    peak: float
    payload: float


def planned(run: str, settings: Mapping[str, Any], cell: Cell) -> Planned | None:
    """The plan of a cell on this machine's CPU; None where it has none."""

    def make() -> Run:
        made = build(run, **settings)
        if cell.micro_batches > 1:
            cut_phases(made.game, cell.micro_batches)
        return made

    ranks = cell.processes
    try:
        with private.fake_world(ranks):
            game = opened(make, ranks)
            world = World(ranks, 0, torch.device("cpu"), ranks)
            chosen = choose(choices(cell.typed, POLICIES), game.game.players)
            cost = Budget(game.game, world, game.trace).cost(chosen)
    except UserError:  # the cell says itself why it is impossible
        return None
    moved = sum(
        each.payload / phase.every for phase in cost.phases for own in phase.collectives.values() for each in own
    )
    return Planned(cost.peak.bytes, moved)
