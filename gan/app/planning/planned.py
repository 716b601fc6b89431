"""A run under the strategy that was typed: what each set of ranks needs, the cheapest that fits, and what to type."""

import json
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass
from itertools import chain, product
from statistics import mode
from typing import Any

import torch
from jsonargparse import Namespace

from gan.app.outputs import say
from gan.app.planning.opening import Opened, opened
from gan.app.run.command_line import run_first, without
from gan.app.run.options import run_settings
from gan.files.errors import UserError, table
from gan.phase import Player
from gan.runs import build, short_name
from strategies import private
from strategies.cost.budget import Budget, Cost, PhaseCost, Serving
from strategies.options.blocks import find_blocks
from strategies.placing.division import Placement, placement_of, served
from strategies.policies import POLICIES
from strategies.policies.amounts import Held, Moved, readable_bytes, size_of
from strategies.policies.choice import Choice, choices, ranks_as_typed
from strategies.training import assignment
from strategies.training.assignment import Auto
from strategies.world import World

MOST = 10**6  # ranks
SPARE = 0.1  # of a device's memory, for what is not a tensor
OWN = ("--run", "--strategy", "--nodes", "--devices", "--memory", "--speed", "--json")
LEVELS = ("ddp", "zero1", "zero2", "zero3", "zero1+hybrid", "zero2+hybrid", "zero3+hybrid", "zero3+offload")
OF_FROZEN = ("ddp", "zero3", "zero3+hybrid", "zero3+offload")
APART = 4  # so many players have a policy of their own in the search; smaller ones have that of the last of these


@dataclass(frozen=True)
class Found:
    """Choices for all players, what they cost, and how many bytes of a device are for tensors."""

    chosen: Mapping[str, Choice]
    cost: Cost
    usable: float

    @property
    def fits(self) -> bool:
        return self.cost.peak.bytes <= self.usable


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
        self, settings: Namespace, typed: Mapping[str, Choice], game: Opened, training: range, placed: Placement | None
    ) -> None:
        """`game` is opened with the batch of a rank that trains."""
        self.memory, self.usable = settings.memory, settings.memory * (1 - SPARE)
        self.game, self.training = game, training
        apart = {} if placed is None else served(placed, typed, game.game)
        self.serving = {name: Serving(ranks, len(training)) for name, ranks in apart.items()}
        where = {name: ranks_as_typed(ranks) for name, ranks in apart.items()}
        # A GPU's: its index means nothing, and it need not be there.
        world = World(len(training), 0, torch.device("cuda"), settings.devices)
        self.budget = Budget(game.game, world, lambda recompute: game.trace(recompute, where), self.serving)
        self.chosen = self.decided(typed)
        costs = {training: self.budget.cost(self.chosen), **self.budget.serving(self.chosen)}
        self.found = {at: Found(self.chosen, cost, self.usable) for at, cost in costs.items()}
        self.fits = all(found.fits for found in self.found.values())

    def decided(self, typed: Mapping[str, Choice]) -> dict[str, Choice]:
        """The choices of all players, with those that `auto` takes."""
        players = self.game.game.players
        chosen = assignment.choose(typed, players)
        here = {name: each for name, each in chosen.items() if name not in self.serving}
        taken = assignment.decide(here, players, self.budget.belongings, self.budget.world, self.memory)
        return {**chosen, **{each.player: each.choice(chosen[each.player]) for each in taken}}

    @property
    def samples(self) -> int:
        """How many samples each network is shown in the whole training, again and again."""
        return self.game.run.max_steps // self.game.run.turns * self.game.samples * len(self.training)

    def hours(self, speed: float | None) -> float | None:
        """How long the training takes, if each rank that trains has so many samples a second."""
        return None if speed is None else self.samples / (speed * len(self.training)) / 3600

    def length(self, speed: float | None) -> str:
        length = f"{self.game.run.max_steps:,} steps are {self.samples:,} samples"
        if speed is None:
            return f"{length}; for the hours type --speed and the samples/s of one device, which gan.fit prints"
        return f"{length}: {self.hours(speed):,.3g} hours at {speed:g} samples/s on each rank that trains"

    def others(self) -> tuple[Found, Found]:
        """What auto would take, and the cheapest that fits."""
        auto = self.decided({"*": Choice("auto")})
        return Found(auto, self.budget.cost(auto), self.usable), search(self.budget, self.usable)


def _plan(argv: list[str], settings: Namespace, planned: Planned) -> int:
    if settings.json:
        plan = {"ranks": settings.nodes * settings.devices, "memory": settings.memory}
        plan |= {"samples": planned.samples, "hours": planned.hours(settings.speed)}
        parts = {ranks_as_typed(at): as_json(found) for at, found in planned.found.items()}
        if planned.serving:
            plan |= {"fits": planned.fits, "parts": parts}
        else:
            auto, cheapest = planned.others()
            plan |= {**parts.popitem()[1], "auto": as_json(auto), "cheapest": as_json(cheapest)}
        say(json.dumps(plan, indent=1))
        return 0 if planned.fits else 1

    say(*head(settings, planned.game, planned.budget), planned.length(settings.speed))
    policies = planned.budget.everybody(planned.chosen)
    for at, found in planned.found.items():
        where = f", ranks {ranks_as_typed(at)}" if planned.serving else ""
        if planned.serving:
            say(f"\n---- ranks {ranks_as_typed(at)} {'train' if at == planned.training else 'serve'}")
        say("", *memory_table(found.cost, policies), "", *traffic_table(found.cost), "")
        say(f"{as_typed(planned.chosen)}{where}: {verdict(found, settings.memory)}")
    if not planned.serving:
        _propose(argv, settings, *planned.others())
    return 0 if planned.fits else 1


def _propose(argv: list[str], settings: Namespace, auto: Found, cheapest: Found) -> None:
    say(f"auto would take {as_typed(auto.chosen)}: {verdict(auto, settings.memory)}")
    needs, strategy = readable_bytes(cheapest.cost.peak.bytes), as_typed(cheapest.chosen)
    if not cheapest.fits:
        least = f"{needs} under {strategy}"
        say(f"nothing fits: the least is {least}; use more ranks, a smaller batch, or devices with more memory")
        return
    moved = cheapest.cost.moved
    links = f"{readable_bytes(moved.within)} in a node and {readable_bytes(moved.between)} between nodes a step"
    say(f"the cheapest that fits needs {needs} and moves {links}:")
    say(f"  {_command(argv, settings, strategy)}")


def _command(argv: list[str], settings: Namespace, strategy: str) -> str:
    name = settings.run
    if ":" in name:  # as it was typed, because the full name has the path of the file
        ending = ":" + short_name(name)
        name = next((word for word in argv if word.endswith(ending) and not word.startswith("-")), name)
    words = ["python", "-m", "gan.fit", name, *without(run_first(argv), OWN)]
    if settings.nodes > 1:
        words += ["--nodes", str(settings.nodes), "--rendezvous", "HOST:PORT"]
    return shlex.join([*words, "--devices", str(settings.devices), "--strategy", strategy])


def head(settings: Namespace, game: Opened, budget: Budget) -> Iterator[str]:
    total = sum(p.numel() for each in budget.belongings.values() for p in each.parameters.values())
    ranks = settings.nodes * settings.devices
    where = f"{ranks} rank{'s' * (ranks > 1)}"
    where += f", {settings.nodes} nodes of {settings.devices}" if settings.nodes > 1 else ""
    each = "each rank that trains" if budget.served else "each rank"
    yield f"{short_name(settings.run)}: {total:,} parameters, on {where}; {game.samples} samples on {each}"
    if game.made_up:
        yield game.made_up
    if game.run.words:
        yield f"settings: {game.run.words}"
    if game.why:
        yield f"\nmeasured on this CPU, because it cannot be played without values: {game.why}"


def verdict(found: Found, memory: float) -> str:
    of, spare = f"of {readable_bytes(memory)} less a tenth", found.usable - found.cost.peak.bytes
    if spare >= 0:
        return f"fits, with {readable_bytes(spare)} to spare {of}"
    return f"does not fit: {readable_bytes(-spare)} too much {of}"


def memory_table(cost: Cost, chosen: Mapping[str, Choice]) -> list[str]:
    peak = cost.peak
    rows = [["player", "policy", "weights", "gradients", "optimizer", "average", "in flight", "all"]]
    for name, held in peak.players.items():
        rows.append([name, str(chosen[name]), *map(_amount, (*astuple(held), held.bytes))])
    rows.append(["activations", *[""] * 6, _amount(peak.activations)])
    rows.append(["all", "", *map(_amount, (*astuple(sum(peak.players.values(), Held())), peak.bytes))])
    there = cost.host.bytes
    host = [f"and {readable_bytes(there)} in the memory of the host, for each rank"] if there else []
    return [f"a rank at its peak, which is in phase '{peak.phase}'", *table(rows, left=(0, 1)), *host]


def traffic_table(cost: Cost) -> list[str]:
    rows = [("phase", "", "peak", "sent in a node", "between nodes")]
    for phase in cost.phases:
        often = "" if phase.every == 1 else f"every {phase.every} steps"
        often += f" {phase.idle:.0%} idle" if phase.idle else ""
        moved = phase.moved
        rows.append((phase.phase, often, _amount(phase.bytes), _amount(moved.within), _amount(moved.between)))
    mean = cost.moved
    rows.append(("a step", "in the mean", "", _amount(mean.within), _amount(mean.between)))
    return ["bytes, sent by a rank to others of its node, and by a node to other nodes", *table(rows, left=(0, 1))]


def as_typed(chosen: Mapping[str, Choice]) -> str:
    """The choices as they are typed after --strategy: the commonest one is that of `*`."""
    texts = {name: str(choice) for name, choice in chosen.items()}
    most = mode(texts.values())
    own = [f"{name}={text}" for name, text in texts.items() if text != most]
    return ",".join([*own, f"*={most}"]) if own else most


def as_json(found: Found) -> dict[str, Any]:
    cost = found.cost
    return {
        "strategy": as_typed(found.chosen),
        "fits": found.fits,
        "bytes": cost.peak.bytes,
        "host": cost.host.bytes,
        "between_phases": {name: asdict(held) for name, held in cost.held.items()},
        "phases": list(map(_of_phase, cost.phases)),
    }


def _of_phase(phase: PhaseCost) -> dict[str, Any]:
    payload: dict[str, float] = defaultdict(int)
    for each in chain(*phase.collectives.values()):
        payload[each.kind] += each.payload
    numbers = {name: getattr(phase, name) for name in ("phase", "every", "idle", "bytes", "activations")}
    held = {name: asdict(each) for name, each in phase.players.items()}
    return {**numbers, "players": held, "moved": asdict(phase.moved), "payload": payload}


def _amount(amount: float) -> str:
    return readable_bytes(amount) if amount else "-"


def search(budget: Budget, usable: float) -> Found:
    """The choices that fit into so many bytes and move least; if none fit, those that need the least memory.

    Fewest bytes between nodes come first, and then fewest within a node; then without recomputation. What is offloaded
    comes last, because it is stepped on the CPU.
    """
    tried: list[Found] = []
    for _, chosen in sorted(_candidates(budget), key=lambda pair: pair[0]):
        tried.append(Found(chosen, budget.cost(chosen), usable))
        if tried[-1].fits:
            return tried[-1]
    return min(tried, key=lambda found: found.cost.peak.bytes)


def _candidates(budget: Budget) -> Iterator[tuple[tuple[float, ...], dict[str, Choice]]]:
    players = [player for player in budget.game.players.values() if player.follows is None]
    large = sorted(players, key=lambda player: -size_of(budget.belongings[player.name].parameters.values()))
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
            chosen = {n: choices(text + "+recompute" * (n in again), POLICIES)["*"] for n, text in taken.items()}
            total = Moved()
            for name, choice in chosen.items():
                if (name, str(choice)) not in costs:
                    costs[name, str(choice)] = budget.moved(name, choice, again)
                total += costs[name, str(choice)]
            offloaded = sum("offload" in text for text in texts)
            sharded = sum(text != "ddp" for text in texts)
            yield (offloaded, total.between, total.within, len(again), sharded), chosen


def _levels(budget: Budget, player: Player) -> tuple[str, ...]:
    world = budget.world
    if world.size == 1 or not budget.policy(player.name, Choice("ddp")).optimizer_cost.elementwise:
        return LEVELS[:1]
    levels = OF_FROZEN if player.frozen else LEVELS
    several = 1 < world.per_node < world.size
    return tuple(level for level in levels if several or "hybrid" not in level)


def _has_blocks(player: Player) -> bool:
    try:
        return not player.frozen and bool(find_blocks(player))
    except UserError:
        return False
