"""A run under the strategy that was typed: what each set of ranks needs, what fits, and what to type for it."""

import json
import shlex
from collections.abc import Mapping

import torch
from jsonargparse import Namespace

from gan.app.outputs import say
from gan.app.planning import table
from gan.app.planning.opening import Opened, opened
from gan.app.planning.search import Found, search
from gan.app.run.options import run_first, run_settings, without
from gan.files.errors import UserError
from gan.runs import build, short_name
from strategies import assignment, private
from strategies.auto import Auto
from strategies.choice import Choice, choices, ranks_as_typed
from strategies.cost.budget import Budget, Cost, Serving
from strategies.paper.amounts import readable
from strategies.placing.placement import Placement, placement_of
from strategies.policies import POLICIES
from strategies.policies.world import World
from strategies.serving import served

MOST = 10**6  # ranks
OWN = ("--run", "--strategy", "--nodes", "--devices", "--memory", "--json")


def plan(argv: list[str], settings: Namespace) -> int:
    """Print the plan of what was typed in `argv`, and read into `settings`. Returns the exit status."""
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
