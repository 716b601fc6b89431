"""Makes a player's learning rate schedule from its recipe, or says why it cannot be used."""

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gan.errors import UserError
from gan.phase import Player

EXAMPLE = "type e.g. schedule=partial(StepLR, step_size=1000)"


def make_schedule(player: Player, optimizer: Optimizer) -> LRScheduler:
    schedule = player.schedule(optimizer)
    if isinstance(schedule, ReduceLROnPlateau):
        raise UserError(
            f"player '{player.name}': ReduceLROnPlateau waits for a score, and a player's schedule gets none: it "
            f"counts updates, steps or epochs; {EXAMPLE}"
        )
    if not isinstance(schedule, LRScheduler):
        raise UserError(
            f"player '{player.name}': its schedule is a function that gets the optimizer and returns a schedule of "
            f"torch.optim.lr_scheduler, and it returned {schedule!r}; {EXAMPLE}"
        )
    return schedule
