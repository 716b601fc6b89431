"""Dropout that draws from torch's own generator, which is not the same on one device and on several ranks."""

from collections.abc import Iterable

from lightning.pytorch.utilities import rank_zero_warn

from gan import noise
from gan.phase import Player


def warn_of_own_dropouts(players: Iterable[Player]) -> None:
    """Name the first dropout of a player whose masks differ from those of one device."""
    for player in players:
        for name, module in () if player.frozen else noise.own_dropouts(player.module):
            rank_zero_warn(
                f"player '{player.name}': the dropout of {type(module).__name__} '{name}' depends on the number of "
                f"ranks, so training differs from one device's; type gan.noise.convert_dropout(network) where you "
                f"make the network"
            )
            return
