"""The learning-rate schedule of pix2pix, CycleGAN and SEAN."""

from collections.abc import Callable
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def linear_decay(steps: int) -> Callable[[Optimizer], LambdaLR]:
    """A `Player(schedule=...)`: the full rate for half of the steps, then in a straight line down to zero."""
    return partial(LambdaLR, lr_lambda=partial(half_then_down, steps))


def half_then_down(steps: int, update: int) -> float:
    """The share of the rate to use for update number `update`."""
    return min(1.0, max(0.0, 2 * (steps - update) / steps))
