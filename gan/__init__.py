"""A framework to train GANs, or any game of several networks, on one device or many.

A game is a `GanModule`. It names its `Player`s (networks) and its `Phase`s (turns). Only `strategies.PhaseStrategy`
decides how players are distributed over devices.
"""

import gc

_collected = gc.isenabled()
gc.disable()  # a fifth of the time of importing torch and Lightning is a search for garbage, and there is none

from gan import noise, ranks  # noqa: E402
from gan.module import GanModule  # noqa: E402
from gan.phase import Phase, Player  # noqa: E402

if _collected:
    gc.enable()

__all__ = ["GanModule", "Phase", "Player", "noise", "ranks"]
