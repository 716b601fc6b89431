"""`python -m gan.plan`: what a run would need and move on many devices, found out without them."""

import json
import shlex
import sys
from collections.abc import Mapping

import torch
from jsonargparse import Namespace

from gan.errors import UserError, refuse
from gan.fit.command import quiet
from gan.fit.options import run_settings, underscores
from gan.plan import options, placed, table
from gan.plan.opening import Opened, opened
from gan.plan.search import search
from gan.runs import build, short_name
from strategies import assignment, private
from strategies.auto import Auto
from strategies.choice import Choice, choices
from strategies.cost.amounts import readable
from strategies.cost.budget import Budget
from strategies.placing.placement import placement_of
from strategies.policies import POLICIES
from strategies.policies.world import World

MOST = 10**6  # ranks
OWN = ("run", "strategy", "nodes", "devices", "memory", "json")


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 where the strategy fits, else 1; 2 if it could not be planned."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        quiet()
        settings = options.parse(argv)
        choice = _choice(settings.strategy)
        ranks = settings.nodes * settings.devices
        if ranks > MOST:
            raise UserError(f"{ranks} ranks are too many; type fewer --nodes or --devices, {MOST:,} at most")
        placement = placement_of(choice, ranks)
        assignment.check_ranks(choice, ranks, placement)
        training = ranks if placement is None else len(placement.training)
        with private.fake_world(training):
            game = opened(lambda: build(settings.run, **run_settings(settings)), training)
            if placement is not None:
                return placed.plan(settings, choice, game, placement)
            return _plan(argv, settings, choice, game)
    except UserError as error:
        return refuse(error)


def _choice(strategy: str) -> dict[str, Choice]:
    """What was typed for --strategy. Refuses what has no plan."""
    choice = choices(strategy, {**POLICIES, "auto": Auto})
    if assignment.in_threads(choice):
        raise UserError("strategy dp is for a quick try of one process, and has no plan; type --strategy ddp")
    for each in choice.values():
        for option, why in (("bf16", "counts 32-bit numbers"), ("compile", "cannot know what torch.compile keeps")):
            if option in each.options:
                raise UserError(f"gan.plan {why}; leave {option} out of --strategy {strategy}")
    return choice


def _plan(argv: list[str], settings: Namespace, choice: Mapping[str, Choice], game: Opened) -> int:
    ranks, usable = settings.nodes * settings.devices, table.usable(settings.memory)
    # A GPU's: its index means nothing, and it need not be there.
    world = World(ranks, 0, torch.device("cuda"), settings.devices)
    budget = Budget(game.game, world, game.trace)
    players, belongings = game.game.players, budget.belongings

    def decided(typed: Mapping[str, Choice]) -> dict[str, Choice]:
        chosen = assignment.choose(typed, players)
        taken = assignment.decide(chosen, players, belongings, world, settings.memory)
        return {**chosen, **{each.player: each.choice(chosen[each.player]) for each in taken}}

    chosen = decided(choice)
    cost = budget.cost(chosen)
    fits = cost.peak.bytes <= usable
    auto = decided({"*": Choice("auto")})
    best = search(budget, usable)
    if settings.json:
        plan = table.as_json(cost, table.typed(chosen), fits)
        more = {
            "auto": table.as_json(budget.cost(auto), table.typed(auto), budget.cost(auto).peak.bytes <= usable),
            "cheapest": table.as_json(best.cost, table.typed(best.chosen), best.fits),
        }
        print(json.dumps({"ranks": ranks, "memory": settings.memory, **plan, **more}, indent=1))
        return 0 if fits else 1

    print(*table.head(settings, game, budget), "", sep="\n")
    print(*table.memory(cost, budget.everybody(chosen)), "", sep="\n")
    print(*table.traffic(cost), "", sep="\n")
    print(f"{table.typed(chosen)}: {table.verdict(cost.peak.bytes, settings.memory)}")
    took = budget.cost(auto)
    print(f"auto would take {table.typed(auto)}: {table.verdict(took.peak.bytes, settings.memory)}")
    if not best.fits:
        least = f"{readable(best.cost.peak.bytes)} under {table.typed(best.chosen)}"
        print(f"nothing fits: the least is {least}; use more ranks, a smaller batch, or devices with more memory")
        return 0 if fits else 1
    moved = best.cost.moved
    links = f"{readable(moved.within)} in a node and {readable(moved.between)} between nodes a step"
    print(f"the cheapest that fits needs {readable(best.cost.peak.bytes)} and moves {links}:")
    print(f"  {_command(argv, settings, table.typed(best.chosen))}")
    return 0 if fits else 1


def _command(argv: list[str], settings: Namespace, strategy: str) -> str:
    """What to type to train so: the same words for the run, and this strategy."""
    words = ["python", "-m", "gan.fit", settings.run if ":" not in settings.run else _named(argv, settings.run)]
    own = True  # whether a word belongs to an option of this command alone; the first one is the run
    for word in argv:
        if word.startswith("--"):
            own = underscores(word)[2:].partition("=")[0] in OWN
        if not own:
            words.append(word)
    if settings.nodes > 1:
        words += ["--nodes", str(settings.nodes), "--rendezvous", "HOST:PORT"]
    return shlex.join([*words, "--devices", str(settings.devices), "--strategy", strategy])


def _named(argv: list[str], run: str) -> str:
    """The run as it was typed, because its full name has the path of the file."""
    return next((word for word in argv if word.endswith(":" + short_name(run)) and not word.startswith("-")), run)
