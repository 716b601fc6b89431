"""What a game costs under the policies of its players: memory at the peak of each phase, and bytes on each link."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType

import numpy as np
from torch import Tensor, nn

from gan.module import GanModule
from gan.phase import Phase
from strategies import private
from strategies.cost.dry import Curve, Dry, Replicated
from strategies.cost.stages import Stages
from strategies.cost.tracing import Trace
from strategies.options.blocks import modules_of_blocks
from strategies.policies import POLICIES
from strategies.policies.amounts import Collective, Group, Held, Moved, bytes_moved, size_of
from strategies.policies.belongings import belongings_of
from strategies.policies.choice import Choice, ranks_as_typed
from strategies.policies.ddp import Ddp
from strategies.policies.pipeline import Pipeline
from strategies.policies.policy import Policy
from strategies.policies.zero1 import Zero1
from strategies.world import World

# What moves for no player: sums over ranks in losses and in batch norms, and what serving ranks return.
LOSSES, ANSWERS = "losses", "answers"


@dataclass(frozen=True)
class PhaseCost:
    """A phase on one rank, at the moment at which it holds most. `moved`: what it moves each time it is played."""

    phase: str
    every: int
    players: Mapping[str, Held]
    activations: float
    collectives: Mapping[str, Sequence[Collective]]
    moved: Moved
    idle: float = 0.0  # the part of the phase in which a rank waits for others: the bubble of a pipeline

    @property
    def bytes(self) -> float:
        return self.activations + sum(each.bytes for each in self.players.values())


@dataclass(frozen=True)
class Cost:
    """A game on one rank. `held` is what stays between phases. `host` is in the CPU's memory, if all players update."""

    held: Mapping[str, Held]
    host: Held
    phases: Sequence[PhaseCost]

    @property
    def peak(self) -> PhaseCost:
        return max(self.phases, key=lambda phase: phase.bytes)

    @property
    def moved(self) -> Moved:
        """Bytes a step, in the mean over many steps."""
        return sum((phase.moved * (1 / phase.every) for phase in self.phases), Moved())


@dataclass(frozen=True)
class Serving:
    """Ranks that serve players to `training` others."""

    ranks: range
    training: int

    @property
    def calls(self) -> int:
        """How many ranks that train send their calls to one of these."""
        return -(-self.training // len(self.ranks))

    @property
    def where(self) -> str:
        return ranks_as_typed(self.ranks)


@dataclass
class Budget:
    """The costs of a game in a world of ranks."""

    game: GanModule
    world: World  # the ranks that train
    trace: Callable[[frozenset[str]], Sequence[Trace]]  # of its phases, for the players that recompute
    served: Mapping[str, Serving] = field(default_factory=dict)  # the players that other ranks serve to them

    def __post_init__(self) -> None:
        # Each is found out once.
        self.traces, self.policy = cache(self.trace), cache(self._policy)
        self.curves = cache(self._curves)
        self.belongings = belongings_of(self.game.players, self.game, self.game.phases)
        own = {id(each) for player in self.game.players.values() for each in _tensors(player.module)}
        self.others = size_of(each for each in _tensors(self.game) if id(each) not in own)  # of no player

    def _policy(self, player: str, choice: Choice) -> Policy:
        """A policy that is not adopted. A player that follows another one has that one's choice."""
        made = self.game.players[player]
        world = replace(self.world, size=len(self.served[player].ranks)) if player in self.served else self.world
        policy = POLICIES[choice.policy](made, world, choice.options, self.belongings[player])
        if made.follows is not None:
            policy.followed = self.policy(made.follows, choice)
        return policy

    def everybody(self, chosen: Mapping[str, Choice]) -> dict[str, Choice]:
        """The choices, with those of players that follow others."""
        return {name: chosen[player.follows or name] for name, player in self.game.players.items()}

    def cost(self, chosen: Mapping[str, Choice]) -> Cost:
        """Of a rank that trains, under these choices, for each player that follows no other one."""
        choices = self.everybody(chosen)
        recompute = self.recomputing(choices)
        here = {name: choice for name, choice in choices.items() if name not in self.served}
        buffers = {name: Held(self.policy(name, choices[name]).buffers) for name in self.served}
        more = []
        for trace in self.traces(recompute):
            sums = [Collective("all-reduce", trace.reduced, Group(self.world.size))] if self.world.size > 1 else []
            calls = {name: self._sent(self.served[name].ranks, sent) for name, sent in trace.sent.items()}
            more.append({**calls, LOSSES: sums})
        activations = [trace.activations + self.others for trace in self.traces(recompute)]
        return self._cost(here, recompute, activations, more, buffers)

    def serving(self, chosen: Mapping[str, Choice]) -> dict[range, Cost]:
        """Of the ranks that serve players. Each keeps the graphs of all calls that it answers."""
        choices = self.everybody(chosen)
        recompute, found = self.recomputing(choices), {}
        for serving in self.served.values():
            there = {name: choices[name] for name, each in self.served.items() if each == serving}
            activations, more = [], []
            for trace in self.traces(recompute):
                others = (serving.calls - 1) * trace.resting(serving.where)  # it answers one call at a time
                activations.append(trace.there(serving.where) + others)
                returned = sum(amount for name, amount in trace.returned.items() if name in there)
                more.append({ANSWERS: self._sent(serving.ranks, serving.calls * returned)})
            found[serving.ranks] = self._cost(there, recompute, activations, more)
        return found

    def _sent(self, serving: range, amount: float) -> list[Collective]:
        """From a rank that trains to one that serves, or back."""
        return [Collective("send", amount, Group(2, serving.start))]

    def _cost(
        self,
        choices: Mapping[str, Choice],
        recompute: frozenset[str],
        activations: Sequence[np.ndarray],
        more: Sequence[Mapping[str, Sequence[Collective]]],
        buffers: Mapping[str, Held] = MappingProxyType({}),
    ) -> Cost:
        """Of a rank that has these players, and of others their buffers. `more`: collectives that no policy makes."""
        held = {name: self.policy(name, choice).between_phases() for name, choice in choices.items()} | dict(buffers)
        curves = {name: self.curves(name, choice, recompute) for name, choice in choices.items()}
        phases = []
        for number, trace in enumerate(self.traces(recompute)):
            mine = {name: each[number] for name, each in curves.items()}
            flying = {name: np.atleast_2d(each.flying) for name, each in mine.items()}
            ranks = np.arange(max(map(len, flying.values())))
            total = activations[number] + sum(each.gradients for each in mine.values())
            total = total + sum(each[ranks % len(each)] for each in flying.values())
            rank, at = map(int, np.unravel_index(total.argmax(), total.shape))  # the rank that holds most, and when
            players = {
                name: replace(
                    held[name],
                    gradients=float(curve.gradients[at]),
                    flying=held[name].flying + float(flying[name][rank % len(flying[name]), at]),
                )
                for name, curve in mine.items()
            }
            sent = {name: curve.collectives for name, curve in mine.items()} | dict(more[number])
            links = bytes_moved([one for each in sent.values() for one in each], self.world.per_node)
            idle = max(curve.idle for curve in mine.values())
            activated = float(activations[number][at])
            phases.append(PhaseCost(trace.phase, trace.every, players | dict(buffers), activated, sent, links, idle))
        host = sum((self.policy(name, choice).on_host() for name, choice in choices.items()), Held())
        return Cost(held, host, phases)

    def moved(self, player: str, choice: Choice, recompute: frozenset[str]) -> Moved:
        """What one player moves in a step, in the mean over many steps; and those that follow it."""
        names = [name for name, other in self.game.players.items() if player in (name, other.follows)]
        traces, local = self.traces(recompute), self.world.per_node
        pairs = (pair for name in names for pair in zip(traces, self.curves(name, choice, recompute), strict=True))
        return sum((bytes_moved(curve.collectives, local) * (1 / trace.every) for trace, curve in pairs), Moved())

    def recomputing(self, choices: Mapping[str, Choice]) -> frozenset[str]:
        """The players whose choice says `recompute`, and who gain by it: single layers in a pipeline do not."""
        asked = {name: choice.policy for name, choice in choices.items() if "recompute" in choice.options}
        in_layers = {name for name, policy in asked.items() if policy == Pipeline.name}
        return frozenset(name for name in asked if name not in in_layers or modules_of_blocks(self.game.players[name]))

    def _curves(self, player: str, choice: Choice, recompute: frozenset[str]) -> list[Curve]:
        traces, policy = self.traces(recompute), self.policy(player, choice)
        with private.fake_world(policy.world.size):
            played = _dry(policy, self.game.phases)
            return [played.play(trace) for trace in traces]


def _dry(policy: Policy, phases: Sequence[Phase]) -> Dry:
    """What plays this policy dry in these phases. It need not be adopted."""
    if policy.world.size > 1 and policy.belongings.parameters:
        if isinstance(policy, Ddp | Zero1):
            return Replicated(policy, phases)
        if isinstance(policy, Pipeline):
            return Stages(policy, phases)
    return Dry(policy, phases)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
