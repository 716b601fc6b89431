"""The weights that checkpoints leave out: those of `Player(saved=False)`.

The game's constructor makes them each time. A checkpoint notes a checksum of each, so that a run never goes on with
other ones: it would differ silently from what it was.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import nn

from gan.checkpoint import Checksum, Share, check_left_out, checksum, read
from gan.errors import UserError
from gan.module import GanModule
from strategies.checkpoint.ranks import SavingRanks
from strategies.policies.policy import Policy


class LeftOut:
    """Made while the weights are whole. A weight that some player changes is not left out, whoever else has it.

    `first`: this is the first rank, whose checksums are saved.
    """

    def __init__(self, game: GanModule, policies: Mapping[str, Policy], first: bool) -> None:
        self.policies = policies
        found: set[int] = set()
        for policy in policies.values():
            if not policy.player.saved:
                found |= set(map(id, policy.player.module.parameters()))
        for policy in policies.values():
            changing = policy.weights if policy.player.follows is None else policy.belongings.parameters
            found -= set(map(id, changing.values()))
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in game.named_parameters() if id(p) in found}
        self.checksums: dict[str, Checksum] = {name: checksum(p) for name, p in self.parameters.items() if first}

    def check(self, game: GanModule, checkpoint: Mapping[str, Any], ranks: SavingRanks) -> None:
        """Raise if a checkpoint is of a run in which these weights had other values."""
        ids = set(map(id, self.parameters.values()))

        def compare() -> None:
            noted = dict(checkpoint.get("left_out", {}))
            for name in self.parameters.keys() & checkpoint["state_dict"].keys():  # saved before saved=False was typed
                share = Share.whole(checkpoint["state_dict"][name].empty())
                read({checkpoint["state_dict"][name]: share})
                noted[name] = checksum(share.tensor)
            for name in self.parameters.keys() - noted.keys():
                raise UserError(f"the checkpoint has neither '{name}' nor its checksum; is it of another network?")
            check_left_out(game, {name: noted[name] for name in self.parameters})

        with ExitStack() as stack:
            for policy in self.policies.values():
                if not ids.isdisjoint(map(id, policy.belongings.parameters.values())):
                    stack.enter_context(policy.gathered())
            ranks.each(compare)
