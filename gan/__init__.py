"""A framework to train GANs, or any game of several networks, on one device or many.

A game is a `GanModule`. It names its `Player`s (networks) and its `Phase`s (turns). Only `strategies.PhaseStrategy`
decides how players are distributed over devices.
"""

import gc
import os

from gan.files import names

names.take()

# Lightning reads these when it is imported, and fails without naming them. What is no number is refused by
# strategies/processes/launcher.py, by name.
_wrong = {
    name: os.environ.pop(name)
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
    if not os.environ.get(name, "0").isdecimal()
}
_collected = gc.isenabled()
gc.disable()  # a fifth of the time of importing torch and Lightning is a search for garbage, and there is none

from gan import noise, ranks  # noqa: E402
from gan.module import GanModule  # noqa: E402
from gan.phase import Phase, Player  # noqa: E402

os.environ.update(_wrong)
if _collected:
    gc.enable()

__all__ = ["GanModule", "Phase", "Player", "noise", "ranks"]
