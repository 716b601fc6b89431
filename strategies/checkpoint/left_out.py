"""The weights that checkpoints leave out: those of `Player(saved=False)`, and of frozen players with `weights=`.

The game's constructor makes the former each time. A checkpoint notes a checksum of each. The latter are read from files
each time. A checkpoint notes the path and a digest of the files. So a run never goes on with other weights: it would
differ silently from what it was.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gan.files.checkpoint import Checksum, SavedTensor, Share, check_left_out, checksum, read
from gan.files.contents import need
from gan.files.errors import UserError
from gan.module import GanModule
from gan.pretrained import WeightFiles, check_files
from strategies.checkpoint.background import SavingRanks
from strategies.policies.policy import Policy


class LeftOut:
    """Made while the weights of the constructor are whole. A weight that some player changes is not left out.

    `first`: this is the first rank, whose checksums are saved. `files` are those of the frozen players that have some.
    """

    def __init__(
        self, game: GanModule, policies: Mapping[str, Policy], first: bool, files: Mapping[str, WeightFiles]
    ) -> None:
        self.policies, self.of_players = policies, files
        in_files = {name: set(map(id, policies[name].player.module.parameters())) for name in files}
        found: set[int] = set().union(*in_files.values())
        for policy in policies.values():
            if not policy.player.saved:
                found |= set(map(id, policy.player.module.parameters()))
        for policy in policies.values():
            changing = policy.weights if policy.player.follows is None else policy.belongings.parameters
            found -= set(map(id, changing.values()))
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in game.named_parameters() if id(p) in found}
        self.names = {
            player: [name for name, parameter in self.parameters.items() if id(parameter) in own]
            for player, own in in_files.items()
        }
        of_files = {name for names in self.names.values() for name in names}
        self.made = {name: p for name, p in self.parameters.items() if name not in of_files}  # by the constructor
        self.checksums: dict[str, Checksum] = {name: checksum(p) for name, p in self.made.items() if first}
        self.files: dict[str, dict[str, Any]] = {}

    def note(self, digests: Mapping[str, str]) -> None:
        """Note for checkpoints which files there are."""
        self.files = {
            name: {"path": str(files.path), "sha256": digests[name], "names": self.names[name]}
            for name, files in self.of_players.items()
        }

    def check(
        self,
        game: GanModule,
        checkpoint: Mapping[str, Any],
        shares: Mapping[Tensor, Share | None],
        ranks: SavingRanks,
    ) -> None:
        """Raise if a checkpoint is of a run in which these weights had other values.

        `shares` are this rank's shares of the sharded parameters.
        """
        ids = set(map(id, self.made.values()))
        saved, noted = checkpoint["state_dict"], checkpoint.get("files", {})

        def compare_files() -> None:
            check_files(noted, self.of_players, {name: each["sha256"] for name, each in self.files.items()})
            for player in self.of_players.keys() - noted.keys():
                for name in self.names[player]:
                    if name not in saved:
                        raise UserError(f"the checkpoint has neither '{name}' nor its file; is it of another network?")
                    weight = self.parameters[name]
                    share = shares[weight] if weight in shares else Share.whole(weight)
                    if share is not None and not _equals(share, need(saved, name, SavedTensor, "state_dict/")):
                        raise UserError(
                            f"the checkpoint has other values of '{name}' than {self.of_players[player].path}; leave "
                            f"weights out for player '{player}'"
                        )

        def compare() -> None:
            noted = dict(checkpoint.get("left_out", {}))
            for name in self.made.keys() & saved.keys():  # saved before saved=False was typed
                there = need(saved, name, SavedTensor, "state_dict/")
                share = Share.whole(there.empty())
                read({there: share})
                noted[name] = checksum(share.tensor)
            for name in self.made.keys() - noted.keys():
                raise UserError(f"the checkpoint has neither '{name}' nor its checksum; is it of another network?")
            check_left_out(game, {name: noted[name] for name in self.made})

        if noted or self.of_players:
            ranks.each(compare_files)
        if not self.made:
            return
        with ExitStack() as stack:
            for policy in self.policies.values():
                if not ids.isdisjoint(map(id, policy.belongings.parameters.values())):
                    stack.enter_context(policy.gathered())
            ranks.each(compare)


def _equals(share: Share, saved: SavedTensor) -> bool:
    """Whether a checkpoint has the same values as this rank's share."""
    there = replace(share, tensor=torch.empty_like(share.tensor, device="cpu", memory_format=torch.contiguous_format))
    read({saved: there})
    return torch.equal(there.tensor, share.tensor.cpu())
