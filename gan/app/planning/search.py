"""Searches the policies of all players for the cheapest that fit."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from gan.files.errors import UserError
from gan.phase import Player
from strategies.amounts import Moved, size
from strategies.choice import Choice, choices
from strategies.cost.budget import Budget, Cost
from strategies.options.blocks import find_blocks
from strategies.policies import POLICIES

LEVELS = ("ddp", "zero1", "zero2", "zero3", "zero1+hybrid", "zero2+hybrid", "zero3+hybrid", "zero3+offload")
OF_FROZEN = ("ddp", "zero3", "zero3+hybrid", "zero3+offload")
APART = 4  # so many players have a policy of their own in the search; smaller ones have that of the last of these


@dataclass(frozen=True)
class Found:
    """The cheapest choices that fit; or, if none does, those that need the least memory."""

    chosen: Mapping[str, Choice]
    cost: Cost
    fits: bool


def search(budget: Budget, usable: float) -> Found:
    """The choices that fit into so many bytes and move least.

    Fewest bytes between nodes come first, and then fewest within a node; then without recomputation. What is offloaded
    comes last, because it is stepped on the CPU.
    """
    candidates = sorted(_candidates(budget), key=lambda pair: pair[0])
    tried: list[Found] = []
    for _, chosen in candidates:
        cost = budget.cost(chosen)
        tried.append(Found(chosen, cost, cost.peak.bytes <= usable))
        if tried[-1].fits:
            return tried[-1]
    return min(tried, key=lambda found: found.cost.peak.bytes)


def _candidates(budget: Budget) -> Iterator[tuple[tuple[float, ...], dict[str, Choice]]]:
    """Choices for all players, with what they cost."""
    players = [player for player in budget.game.players.values() if player.follows is None]
    large = sorted(players, key=lambda player: -size(budget.belongings[player.name].parameters.values()))
    apart, rest = large[:APART], large[APART:]
    for recompute in (False, True):
        again = frozenset(player.name for player in players if recompute and _has_blocks(player))
        if recompute and not again:
            return
        costs: dict[tuple[str, str], Moved] = {}
        for texts in product(*(_levels(budget, player) for player in apart)):
            taken = {player.name: text for player, text in zip(apart, texts, strict=True)}
            for player in rest:
                levels = _levels(budget, player)
                taken[player.name] = texts[-1] if texts[-1] in levels else levels[0]
            chosen = {
                name: choices(text + "+recompute" * (name in again), POLICIES)["*"] for name, text in taken.items()
            }
            total = Moved()
            for name, choice in chosen.items():
                if (name, str(choice)) not in costs:
                    costs[name, str(choice)] = budget.moved(name, choice, again)
                total += costs[name, str(choice)]
            offloaded = sum("offload" in text for text in texts)
            sharded = sum(text != "ddp" for text in texts)
            yield (offloaded, total.between, total.within, len(again), sharded), chosen


def _levels(budget: Budget, player: Player) -> tuple[str, ...]:
    """What the search tries for a player."""
    world = budget.world
    if world.size == 1 or not budget.policy(player.name, Choice("ddp")).optimizer_cost.elementwise:
        return LEVELS[:1]
    levels = OF_FROZEN if player.frozen else LEVELS
    several = 1 < world.per_node < world.size
    return tuple(level for level in levels if several or "hybrid" not in level)


def _has_blocks(player: Player) -> bool:
    """Whether the option recompute finds something to do for a player that learns."""
    try:
        return not player.frozen and bool(find_blocks(player))
    except UserError:
        return False
