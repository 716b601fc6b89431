"""Finds weights that are not finite in what ranks save and load."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gan.checkpoint import Share
from gan.finite import Bad, as_made, not_finite
from gan.module import GanModule
from gan.phase import Player


class FiniteWeights:
    """Made while buffers are as the constructor made them."""

    def __init__(self, game: GanModule, players: Mapping[str, Player]) -> None:
        self.game, self.players = game, players
        self.meant = as_made(game)

    def bad(self, state: Mapping[str, Any], averages: Mapping[str, Mapping[str, Share] | None]) -> list[Bad]:
        """What is not finite in this rank's shares of the weights and the averages."""
        owners: dict[int, tuple[str, str]] = {}
        for player in self.players.values():
            for name, value in player.module.state_dict(keep_vars=True).items():
                owners.setdefault(id(value), (player.name, name))
        places: dict[str, tuple[str, str]] = {}
        shares: dict[str, Tensor] = {}
        for name, value in self.game.state_dict(keep_vars=True).items():
            if id(value) in owners and name not in self.meant and isinstance(state.get(name), Share):
                places[name], shares[name] = owners[id(value)], state[name].tensor
        for player, average in averages.items():
            for name, share in (average or {}).items():
                key = f"average/{player}/{name}"
                places[key], shares[key] = (player, f"{name} (its moving average)"), share.tensor
        return [(*places[key], what) for key, what in not_finite(shares).items()]
