"""A framework to train GANs, or any game of several networks, on one device or many.

A game is a `GanModule`. It names its `Player`s (networks) and its `Phase`s (turns). Only `strategies.PhaseStrategy`
decides how players are distributed over devices. `gan.open` opens a trained run, to draw with it.
"""

from typing import TYPE_CHECKING

from gan.files.loading import by_name, loading, take_names

take_names()

with loading():
    from gan import noise, ranks
    from gan.phase import Phase, Player

if TYPE_CHECKING:
    from gan.module import GanModule

# `open` is not among them: `from gan import *` would hide Python's own.
__all__ = ["GanModule", "Phase", "Player", "noise", "ranks"]
__getattr__ = by_name(__name__, {"gan.module": "GanModule", "gan.app.editing.editors": "open"})
