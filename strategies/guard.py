"""Counts the updates that ranks skip together, and ends a run that no longer learns."""

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gan.files.errors import UserError
from gan.phase import Phase
from strategies.policies.policy import Policy
from strategies.world import World

PATIENCE = 10  # updates that the guard lets go


class NothingLearned(UserError):
    """The run does not learn any more, so it ends. Every rank raises this together."""

    agreed = True


class Guard:
    """Counts skipped updates, warns about them, and ends a run that no longer learns.

    One bad batch costs only one update. But a phase does not recover if its loss is not finite the first time it is
    played, or if its learner has skipped `PATIENCE` updates in a row. Then the run stops at the start of the next
    step, so that a checkpoint can be saved after this one. As long as the loss scale is still falling, the guard waits.
    """

    def __init__(self) -> None:
        self.in_a_row: dict[tuple[str, str], int] = {}
        self.verdict: str | None = None  # with which the run stops before its next step

    def saw(
        self, phase: Phase, learner: Policy, finite: bool, losses: dict[str, Tensor], step: int, world: World
    ) -> None:
        """Count one update, done or skipped. `finite` is the same on every rank."""
        key = (phase.name, learner.player.name)
        first = key not in self.in_a_row
        self.in_a_row[key] = many = 0 if finite else self.in_a_row.get(key, 0) + 1
        if finite:
            return
        learner.skipped += 1
        bad = {name: loss.item() for name, loss in losses.items() if not torch.isfinite(loss)}
        said = [f"the loss is {each}" if name == "loss" else f"loss '{name}' is {each}" for name, each in bad.items()]
        cause = sorted({text for texts in world.gather(said) for text in texts})
        what = ", ".join(cause) if cause else "the losses are finite, a gradient is not"
        rank_zero_warn(
            f"step {step}, phase '{phase.name}': {what}; skipped the update of '{key[1]}' on all ranks "
            f"({learner.skipped} so far)"
        )
        scale_falls = learner.loss_scale is not None and learner.loss_scale.scale >= 1
        if not scale_falls and ((first and cause) or many >= PATIENCE):
            skipped = "the update" if many == 1 else f"{many} updates in a row"
            self.verdict = (
                f"phase '{phase.name}' does not learn: at step {step}, {what}; skipped {skipped} of '{key[1]}'; the "
                f"weights are as before. Try a lower learning rate, clip=1.0, or --debug to find the operation"
            )

    def raise_if_hopeless(self) -> None:
        if self.verdict is not None:
            raise NothingLearned(self.verdict)
