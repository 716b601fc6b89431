"""`python -m gan.plan`: what a run would need and move on many devices, found out without them."""

import json
import re
import shlex
import sys
from collections.abc import Mapping

import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt

from gan import plan
from gan.app.outputs import quiet, run
from gan.app.planning import table
from gan.app.planning.opening import Opened, opened
from gan.app.planning.search import search
from gan.app.run import run_options
from gan.app.run.options import run_settings, underscores
from gan.app.run.parser import Parser
from gan.files.errors import UserError, refuse
from gan.runs import build, short_name
from strategies import assignment, private
from strategies.auto import Auto
from strategies.choice import Choice, choices, ranks_as_typed
from strategies.cost.budget import Budget, Serving
from strategies.paper.amounts import readable
from strategies.placing.placement import Placement, placement_of
from strategies.policies import POLICIES
from strategies.policies.world import World
from strategies.serving import served

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

EXAMPLES = """examples:
  python -m gan.plan r3gan-faces --strategy zero3 --devices 8
  python -m gan.plan my_game.py:my_run --nodes 4 --devices 8 --memory 80G --batch-size 256
  python -m gan.plan my_game.py:my_run --strategy generator=zero3+hybrid,*=ddp --nodes 4 --devices 8
  python -m gan.plan samples/distillation.py:distillation --billions 14 --nodes 8 --devices 8
  python -m gan.plan samples/distillation.py:distillation --json
  python -m gan.plan r3gan-faces --help           the settings of that run

It needs none of the devices: the game is played once without values, on torch's meta device, with the batch of one
rank. Every policy says what it would hold and move meanwhile. Counted are the tensors, in 32-bit numbers. A tenth of
the memory is left for what is not a tensor: libraries, buffers of collectives, and gaps. "activations" are all other
tensors: the batch, what backward needs, and gradients before a weight has all of its own.

exit status: 0 the strategy fits; 1 it does not; 2 it could not be planned
"""


def parse(argv: list[str] | None = None) -> Namespace:
    """The settings. `memory` is a number of bytes."""
    settings = run_options.parse(
        argv,
        _add_own,
        prog="python -m gan.plan",
        usage="python -m gan.plan [RUN] [--strategy POLICY] [--nodes N] [--devices N] [--memory 80G] [options]",
        description="Plan a run on many devices without them: memory of a rank, bytes on each link, and what fits.",
        epilog=EXAMPLES,
    )
    settings.memory = _bytes(settings.memory)
    return settings


def _bytes(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.strip().upper())
    if not found or not float(found[1]):
        raise UserError(f"cannot read --memory '{text}'; type the memory of one device, such as 80G or 512M")
    return float(found[1]) * UNITS[found[2]]


def _add_own(parser: Parser) -> None:
    add = parser.add_argument
    add("--strategy", type=str, default="ddp", help="as for gan.fit, also auto")
    add("--nodes", type=PositiveInt, default=1, help="number of hosts")
    add("--devices", type=PositiveInt, default=8, help="devices on each host")
    add("--memory", type=str, default="80G", help="the memory of one device")
    add("--json", action="store_true", help="print one JSON object, in bytes, for programs")


MOST = 10**6  # ranks
OWN = ("run", "strategy", "nodes", "devices", "memory", "json")


def main(argv: list[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0 where the strategy fits, else 1; 2 if it could not be planned."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        quiet()
        settings = plan.parse(argv)
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
                return _plan_of_parts(settings, choice, game, placement)
            return _plan(argv, settings, choice, game)
    except UserError as error:
        return refuse(error)


def _choice(strategy: str) -> dict[str, Choice]:
    """What was typed for --strategy. Refuses what has no plan."""
    choice = choices(strategy, {**POLICIES, "auto": Auto})
    assignment.is_dp(choice)  # it refuses dp for some of the players
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


def _plan_of_parts(settings: Namespace, typed: Mapping[str, Choice], game: Opened, placement: Placement) -> int:
    """Print the plan of a rank that trains, and of one of each set that serves frozen players. Returns 0 if both fit.

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


if __name__ == "__main__":
    run(main)
