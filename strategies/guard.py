"""The guard: what happens when gradients are not finite."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gan.errors import UserError
from gan.phase import Phase
from strategies.policies.policy import Policy

PATIENCE = 10


class Hopeless(UserError):
    """Every rank has come to this verdict, and ends."""

    agreed = True


class Guard:
    """Counts skipped updates, says so, and ends a run that no longer learns.

    One bad batch costs one update. A phase whose loss is not finite the first time it is played, or whose
    learner has skipped `PATIENCE` updates in a row, will not mend. Then the run stops at the start of the next
    step, between two steps, so that what was saved at the end of this one is whole. While a loss scale still
    falls, nothing is decided.
    """

    def __init__(self, gather: Callable[[Any], list[Any]]) -> None:
        """`gather` gives what each rank says."""
        self.gather = gather
        self.in_a_row: dict[tuple[str, str], int] = {}
        self.verdict: str | None = None

    def saw(self, phase: Phase, learner: Policy, finite: bool, losses: dict[str, Tensor], step: int) -> None:
        """Take note of one update; every rank sees the same `finite`."""
        key = (phase.name, learner.player.name)
        first = key not in self.in_a_row
        self.in_a_row[key] = 0 if finite else self.in_a_row.get(key, 0) + 1
        if finite:
            return
        learner.skipped += 1
        bad = [f"{name} is {loss.item()}" for name, loss in losses.items() if not torch.isfinite(loss)]
        cause = sorted({text for texts in self.gather(bad) for text in texts})
        what = f"loss {', '.join(cause)}" if cause else "the losses are finite, a gradient is not"
        rank_zero_warn(
            f"step {step}, phase '{phase.name}': {what}; skipped the update of '{key[1]}' on all ranks "
            f"({learner.skipped} so far)"
        )
        scale_falls = learner.loss_scale is not None and learner.loss_scale.scale >= 1
        if not scale_falls and ((first and cause) or self.in_a_row[key] >= PATIENCE):
            self.verdict = (
                f"phase '{phase.name}' does not learn: at step {step}, {what}, "
                f"{self.in_a_row[key]} update(s) of '{key[1]}' skipped in a row; the weights are as before. "
                f"Try a lower learning rate, clip=1.0, or --debug to find the operation"
            )

    @property
    def hopeless(self) -> bool:
        """Whether the run will stop before its next step."""
        return self.verdict is not None

    def raise_if_hopeless(self) -> None:
        """Stop, with the reason."""
        if self.verdict is not None:
            raise Hopeless(self.verdict)
