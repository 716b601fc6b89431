"""A framework to train GANs, and any game of several networks, on one device or many.

A game is a `GanModule`: it names its `Player`s (sub-networks) and its `Phase`s (turns). How the players
live on devices is the business of `strategies.PhaseStrategy`, and of nobody else.
"""

from gan.module import GanModule
from gan.phase import Phase, Player

__all__ = ["GanModule", "Phase", "Player"]
