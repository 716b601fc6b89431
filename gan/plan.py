"""`python -m gan.plan`: what a run would need and move on many devices, found out without them."""

import json
import re
import shlex
from collections.abc import Mapping

import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt

from gan.app.command import command
from gan.app.outputs import run, say
from gan.app.planning import table
from gan.app.planning.opening import Opened, opened
from gan.app.planning.search import Found, search
from gan.app.run import run_options
from gan.app.run.options import run_first, run_settings, without
from gan.app.run.parser import Parser
from gan.files.errors import UserError
from gan.runs import build, short_name
from strategies import assignment, private
from strategies.amounts import readable
from strategies.auto import Auto
from strategies.choice import Choice, choices, ranks_as_typed
from strategies.cost.budget import Budget, Cost, Serving
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


MOST = 10**6  # ranks
OWN = ("--run", "--strategy", "--nodes", "--devices", "--memory", "--json")


@command
def main(argv: list[str]) -> int:
    """Print the plan. Returns the exit status: 0 where the strategy fits, else 1; 2 if it could not be planned."""
    settings = parse(argv)
    typed = _choice(settings.strategy)
    ranks = settings.nodes * settings.devices
    if ranks > MOST:
        raise UserError(f"{ranks} ranks are too many; type fewer --nodes or --devices, {MOST:,} at most")
    placement = placement_of(typed, ranks)
    assignment.check_ranks(typed, ranks, placement)
    training = range(ranks) if placement is None else placement.training
    with private.fake_world(len(training)):
        game = opened(lambda: build(settings.run, **run_settings(settings)), len(training))
        return _plan(argv, settings, Planned(settings, typed, game, training, placement))


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


def _choice(strategy: str) -> dict[str, Choice]:
    """What was typed for --strategy. Refuses what has no plan."""
    choice = choices(strategy, {**POLICIES, "auto": Auto})
    assignment.is_dp(choice)  # it refuses dp for some of the players
    for each in choice.values():
        for option, why in (("bf16", "counts 32-bit numbers"), ("compile", "cannot know what torch.compile keeps")):
            if option in each.options:
                raise UserError(f"gan.plan {why}; leave {option} out of --strategy {strategy}")
    return choice


class Planned:
    """A game under the strategy that was typed: what each set of ranks needs, those that train first."""

    def __init__(
        self,
        settings: Namespace,
        typed: Mapping[str, Choice],
        game: Opened,
        training: range,
        placement: Placement | None,
    ) -> None:
        """`game` is opened with the batch of a rank that trains."""
        self.memory, self.usable = settings.memory, table.usable(settings.memory)
        self.game, self.training = game, training
        apart = {} if placement is None else served(placement, typed, game.game)
        self.serving = {name: Serving(each.ranks, len(training)) for name, each in apart.items()}
        where = {name: ranks_as_typed(each.ranks) for name, each in apart.items()}
        # A GPU's: its index means nothing, and it need not be there.
        world = World(len(training), 0, torch.device("cuda"), settings.devices)
        self.budget = Budget(game.game, world, lambda recompute: game.trace(recompute, where), self.serving)
        self.chosen = self.decided(typed)
        costs = {training: self.budget.cost(self.chosen), **self.budget.serving(self.chosen)}
        self.found = {at: self.judged(self.chosen, cost) for at, cost in costs.items()}
        self.fits = all(found.fits for found in self.found.values())

    def decided(self, typed: Mapping[str, Choice]) -> dict[str, Choice]:
        """The choices of all players, with those that `auto` takes."""
        players = self.game.game.players
        chosen = assignment.choose(typed, players)
        here = {name: each for name, each in chosen.items() if name not in self.serving}
        taken = assignment.decide(here, players, self.budget.belongings, self.budget.world, self.memory)
        return {**chosen, **{each.player: each.choice(chosen[each.player]) for each in taken}}

    def judged(self, chosen: Mapping[str, Choice], cost: Cost) -> Found:
        return Found(chosen, cost, cost.peak.bytes <= self.usable)

    def others(self) -> tuple[Found, Found]:
        """What auto would take, and the cheapest that fits."""
        auto = self.decided({"*": Choice("auto")})
        return self.judged(auto, self.budget.cost(auto)), search(self.budget, self.usable)


def _plan(argv: list[str], settings: Namespace, planned: Planned) -> int:
    """Print it. Returns the exit status. Of players on ranks of their own, nothing else is proposed."""
    if settings.json:
        plan = {"ranks": settings.nodes * settings.devices, "memory": settings.memory}
        parts = {ranks_as_typed(at): table.as_json(found) for at, found in planned.found.items()}
        if planned.serving:
            plan |= {"fits": planned.fits, "parts": parts}
        else:
            auto, cheapest = planned.others()
            plan |= {**parts.popitem()[1], "auto": table.as_json(auto), "cheapest": table.as_json(cheapest)}
        say(json.dumps(plan, indent=1))
        return 0 if planned.fits else 1

    say(*table.head(settings, planned.game, planned.budget))
    policies = planned.budget.everybody(planned.chosen)
    for at, found in planned.found.items():
        where = f", ranks {ranks_as_typed(at)}" if planned.serving else ""
        if planned.serving:
            say(f"\n---- ranks {ranks_as_typed(at)} {'train' if at == planned.training else 'serve'}")
        say("", *table.memory(found.cost, policies), "", *table.traffic(found.cost), "")
        say(f"{table.typed(planned.chosen)}{where}: {table.verdict(found.cost, settings.memory)}")
    if not planned.serving:
        _propose(argv, settings, *planned.others())
    return 0 if planned.fits else 1


def _propose(argv: list[str], settings: Namespace, auto: Found, cheapest: Found) -> None:
    say(f"auto would take {table.typed(auto.chosen)}: {table.verdict(auto.cost, settings.memory)}")
    needs, strategy = readable(cheapest.cost.peak.bytes), table.typed(cheapest.chosen)
    if not cheapest.fits:
        least = f"{needs} under {strategy}"
        say(f"nothing fits: the least is {least}; use more ranks, a smaller batch, or devices with more memory")
        return
    moved = cheapest.cost.moved
    links = f"{readable(moved.within)} in a node and {readable(moved.between)} between nodes a step"
    say(f"the cheapest that fits needs {needs} and moves {links}:")
    say(f"  {_command(argv, settings, strategy)}")


def _command(argv: list[str], settings: Namespace, strategy: str) -> str:
    """What to type to train so: the same words for the run, and this strategy."""
    words = ["python", "-m", "gan.fit", settings.run if ":" not in settings.run else _named(argv, settings.run)]
    words += without(run_first(argv), OWN)
    if settings.nodes > 1:
        words += ["--nodes", str(settings.nodes), "--rendezvous", "HOST:PORT"]
    return shlex.join([*words, "--devices", str(settings.devices), "--strategy", strategy])


def _named(argv: list[str], run: str) -> str:
    """The run as it was typed, because its full name has the path of the file."""
    return next((word for word in argv if word.endswith(":" + short_name(run)) and not word.startswith("-")), run)


if __name__ == "__main__":
    run(main)
