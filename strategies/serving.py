"""What a serving rank does in place of training: it sets up the players that it serves."""

import signal
from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn

from gan.files.errors import UserError
from gan.making import aside
from gan.module import GanModule
from strategies.assignment import assign, choose
from strategies.checkpoint.writing import SavingRanks
from strategies.choice import Choice, ranks_as_typed
from strategies.first_weights import FirstWeights, without_values
from strategies.placing.elsewhere import check, leave
from strategies.placing.placement import Placement
from strategies.policies.policy import Policy
from strategies.policies.world import World
from strategies.processes.stopping import SIGNALS, Signals
from strategies.sharding.resharded_parameter import resharded


def served(placement: Placement, choice: Mapping[str, Choice], game: GanModule) -> dict[str, Choice]:
    """What was typed for the players that other ranks serve. Raises if one cannot be served."""
    chosen = {name: each for name, each in choose(choice, game.players).items() if placement.serves(each)}
    for name, each in chosen.items():
        check(game.players[name], game.players, str(each))
    for typed, ranks in placement.serving.items():
        if not any(each.ranks == ranks for each in chosen.values()):
            raise UserError(
                f"--strategy gives ranks {ranks_as_typed(ranks)} to '{typed}', and all players of this game are typed "
                f"by name; leave {typed}={choice[typed]} out, and have fewer devices"
            )
    return chosen


class Served(GanModule):
    """The part of a game that is on these ranks: some players and no phases. The others' weights are freed."""

    def __init__(self, game: GanModule, chosen: Mapping[str, Choice], world: World, precision: Precision) -> None:
        super().__init__()
        self.players = {name: game.players[name] for name in chosen}
        self.networks = nn.ModuleList(player.module for player in self.players.values())
        self.chosen = {name: Choice(each.policy, each.options) for name, each in chosen.items()}
        self.world, self.precision = world, precision
        for player in game.players.values():
            if player.name not in chosen:
                leave(player, "other ranks")

    def policies(self, training: bool, smallest: Callable[[Tensor], Tensor]) -> dict[str, Policy]:
        """The policies, with the weights from their files. `smallest` returns the smallest of all ranks' numbers."""
        world = self.world
        with aside(self, resharded):
            self.precision.convert_module(self)
        with without_values(self):
            self.to(world.device)
        first = FirstWeights(self, world.device, 0, False, SavingRanks(world.rank, world.size))
        policies = assign(self.chosen, self, world, self.precision, smallest)
        first.begin(policies.values() if training else ())
        for policy in policies.values():
            policy.adopt(training)
            policy.learn(False)
        first.fill_shards()
        return policies


class Notice:
    """Notices a signal to end, for the ranks that train: they end together, and then this one is told.

    Ctrl-C reaches all ranks, and those that train decide what it means.
    """

    def __init__(self, signals: Signals) -> None:
        self.number = 0
        signals.take((*SIGNALS, signal.SIGINT), self._take)

    def _take(self, number: int, _: Any) -> None:
        if number != signal.SIGINT:
            self.number = int(number)

    def __call__(self) -> int:
        return self.number
