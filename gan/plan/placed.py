"""The plan of a run in which some ranks serve frozen players to the others."""

import json
from collections.abc import Mapping

import torch
from jsonargparse import Namespace

from gan.plan import table
from gan.plan.opening import Opened
from strategies import assignment
from strategies.choice import Choice, ranks_as_typed
from strategies.cost.budget import Budget, Serving
from strategies.placing.placement import Placement
from strategies.placing.serving import served
from strategies.policies.world import World


def plan(settings: Namespace, typed: Mapping[str, Choice], game: Opened, placement: Placement) -> int:
    """Print it, for a rank that trains and for one of each set that serves. Returns 0 if both fit, else 1.

    `game` is opened with the batch of a rank that trains.
    """
    players, training = game.game.players, len(placement.training)
    chosen = assignment.choose(typed, players)
    ranks = {name: each.ranks for name, each in served(placement, typed, game.game).items()}
    world = World(training, 0, torch.device("cuda"), settings.devices)
    where = {name: ranks_as_typed(each) for name, each in ranks.items()}
    serving = {name: Serving(each, training) for name, each in ranks.items()}
    budget = Budget(game.game, world, lambda recompute: game.trace(recompute, where), serving)

    here = {name: each for name, each in chosen.items() if name not in ranks}
    for each in assignment.decide(here, players, budget.belongings, world, settings.memory):
        chosen[each.player] = each.choice(chosen[each.player])
    costs = {placement.training: budget.cost(chosen), **budget.serving(chosen)}
    fits = {at: cost.peak.bytes <= table.usable(settings.memory) for at, cost in costs.items()}
    strategy = table.typed(chosen)
    if settings.json:
        parts = {ranks_as_typed(at): table.as_json(cost, strategy, fits[at]) for at, cost in costs.items()}
        total = {"ranks": settings.nodes * settings.devices, "memory": settings.memory, "fits": all(fits.values())}
        print(json.dumps({**total, "parts": parts}, indent=1))
        return 0 if all(fits.values()) else 1

    print(*table.head(settings, game, budget), sep="\n")
    policies = budget.everybody(chosen)
    for at, cost in costs.items():
        print(f"\n---- ranks {ranks_as_typed(at)} {'train' if at == placement.training else 'serve'}\n")
        print(*table.memory(cost, policies), "", *table.traffic(cost), "", sep="\n")
        print(f"{strategy}, ranks {ranks_as_typed(at)}: {table.verdict(cost.peak.bytes, settings.memory)}")
    return 0 if all(fits.values()) else 1
