"""What a training tells loggers, callbacks and the progress bar: the means over ranks of its losses."""

import torch
from torch import Tensor

from strategies import private
from strategies.processes.whereabouts import Whereabouts
from strategies.turn import Training

ROOM = 64  # for losses: a message has a multiple of it
ASKING = ("monitor", "filename")  # attributes of callbacks with the names of what is logged


class Logged:
    """Logs when a logger is due, the epoch ends, or a callback asks.

    Not in every step, because Lightning's bookkeeping for a few numbers takes milliseconds.
    """

    def __init__(self, training: Training, whereabouts: Whereabouts) -> None:
        self.game, self.policies, self.world = training.game, training.policies, training.world
        self.whereabouts = whereabouts
        self.losses: dict[str, Tensor] = {}  # the last ones since the loggers got some, and norms of gradients
        self.logged = False  # whether the loggers have these losses
        self.heard = True  # whether anybody has those of the last step
        words = (str(getattr(each, name, "")) for each in private.callbacks(self.game.trainer) for name in ASKING)
        self.asked = " ".join(words)  # with the names of losses of which callbacks ask in each step

    def begin_step(self) -> None:
        """A phase that is not played until the loggers get more has nothing to tell."""
        if self.logged:
            private.forget_logged(self.game.trainer, self.losses)
            self.losses, self.logged = {}, False

    def end_step(self) -> None:
        trainer = self.game.trainer
        if trainer.is_last_batch:  # on other ranks perhaps not
            self.whereabouts.meet()
        asked, self.logged = any(name in self.asked for name in self.losses), private.logs_are_due(trainer)
        self.heard = asked or self.logged or trainer.is_last_batch
        if self.heard:
            self._log()

    def end_epoch(self) -> None:
        """Log the last losses where nobody has them, as where should_stop ends the epoch; for loggers at max_steps.

        A stopped training has no row more in its log than one that went on.
        """
        self.whereabouts.meet()
        last = self.game.trainer.global_step == self.game.trainer.max_steps
        if not self.heard or (last and not self.logged):
            private.log_anew(self.game.trainer, "on_train_epoch_end", self.losses)
            self._log(None if last else False)

    def _log(self, logger: bool | None = None) -> None:
        if self.losses:
            values = torch.stack([loss.float() for loss in self.losses.values()])
            # Ranks that have gone different ways have other losses, and would wait here: the next save names them.
            padded = torch.nn.functional.pad(values, (0, -len(values) % ROOM))
            self.losses = dict(zip(self.losses, self.world.mean(padded), strict=False))
        skipped = {f"{name}/skipped": float(each.skipped) for name, each in self.policies.items() if each.skipped}
        self.game.log_dict({**self.losses, **skipped}, logger=logger)
