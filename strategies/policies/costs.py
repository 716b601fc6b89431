"""What a policy costs: the part of it that plans ask, before any training."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from torch import nn

from gan.phase import Phase, Player
from strategies.cost.amounts import Group, Held
from strategies.cost.optimizer import OptimizerCost, optimizer_cost
from strategies.cost.paper import Paper, size
from strategies.policies.belongings import Belongings
from strategies.policies.world import World


class Costs:
    """Memory and messages of a policy. It needs no other rank, and no weight needs a value.

    A policy for many devices says here what it shards and sends. See strategies/cost/ for who asks.
    """

    player: Player
    world: World
    belongings: Belongings
    weights: Mapping[str, nn.Parameter]  # those that learn

    def holds(self) -> Held:
        """What a rank holds of the player between phases, on its device. Buffers count as weights."""
        learning = size(self.weights.values())
        state = self.optimizer_cost.state * learning
        return Held(size(self.belongings.parameters.values()) + self.buffers, 0, state, self.averaged_part * learning)

    def at_most(self) -> Held:
        """The same in a phase in which it learns, without activations. No phase is known yet, so it is a bound."""
        return replace(self.holds(), gradients=size(self.weights.values()))

    def on_host(self) -> Held:
        """What a rank holds of the player in the CPU's memory, between phases and in its update."""
        return Held()

    def paper(self) -> Paper:
        """What it does in a phase, on paper."""
        return Paper(self.player.name, self.weights, self.step_bytes(size(self.weights.values())))

    def idle(self, phase: Phase) -> float:
        """The part of a phase in which this rank waits for others that compute: the bubble of a pipeline."""
        return 0.0

    @cached_property
    def optimizer_cost(self) -> OptimizerCost:
        return optimizer_cost(self.player)

    @property
    def averaged_part(self) -> int:
        """How many averages are kept of each weight that learns."""
        return int(self.player.ema is not None and self.player.follows is None)

    @property
    def buffers(self) -> int:
        """The bytes of buffers, and of their averages."""
        kinds = 2 if self.averaged_part and self.player.ema_buffers == "averaged" else 1
        return kinds * size(self.player.module.buffers())

    def step_bytes(self, owned: float) -> float:
        """What the optimizer needs for a while, to step so many bytes of weights."""
        if self.world.device.type != "cpu":
            return self.optimizer_cost.all * owned
        return self.optimizer_cost.on_cpu([size([each]) for each in self.weights.values()], owned)

    @property
    def everyone(self) -> Group:
        """All ranks, on paper."""
        return Group(self.world.size)
