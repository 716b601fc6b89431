"""A framework to train GANs, or any game of several networks, on one device or many.

A game is a `GanModule`. It names its `Player`s (networks) and its `Phase`s (turns). Only `strategies.PhaseStrategy`
decides how players are distributed over devices.
"""

from gan import noise, ranks
from gan.module import GanModule
from gan.phase import Phase, Player

__all__ = ["GanModule", "Phase", "Player", "noise", "ranks"]
