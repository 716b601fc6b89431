"""What keeps the ranks of a training together: all end after the same step, and name one that is lost."""

import os
import secrets
import signal
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn

from gan.files.disk import remove_parts
from strategies import private
from strategies.processes import agent, slurm
from strategies.processes.board import shared_board
from strategies.processes.lost_ranks import Survivor
from strategies.processes.same_on_ranks import SameOnRanks
from strategies.processes.stopping import Ending, tell
from strategies.processes.whereabouts import Whereabouts
from strategies.world import World

YES = partial(bool, 1)  # unlike a lambda, it may be handed to a spawned process


class Lockstep:
    """The ranks as one training. Before set-up, and in a single process, there is nothing to keep together."""

    def __init__(self) -> None:
        self.ending, self.same_on_ranks, self.whereabouts = Ending(), SameOnRanks(), Whereabouts()
        self.signals = ExitStack()  # closed, it puts the earlier handlers back
        self.survivor: Survivor | None = None  # made by the launcher
        self.advice = ""  # the command to type after a rank was lost
        self.saved: Callable[[], bool] = YES  # whether there is a checkpoint from which that goes on
        self.settle: Callable[[], object] = YES  # ends what the ranks do beside training
        self.requeues = True  # whether a warned job of Slurm is saved and requeued here; gan.fit does so itself
        self._requeue: Requeue | None = None

    def tie(self, store: dist.Store, size: int, host: str) -> None:
        """From here on a rank that fails is named by all others. They settle first what all do together."""
        if self.survivor is None:
            return
        self.survivor.beside = lambda lost: self.whereabouts.beside(lost)
        self.survivor.saved = self.saved
        self.survivor.settle = self.settle
        self.survivor.tie(store, size, host, self.advice)

    def is_lost(self) -> bool:
        return self.survivor is not None and self.survivor.lost

    def name_run(self, world: World, trainer: Trainer | None) -> None:
        """Give all ranks one name for this run. The process group must exist. Pass the trainer only in training."""
        run = world.broadcast(secrets.token_hex(8))
        store = dist.PrefixStore(run, private.default_store()) if world.size > 1 else None
        self.ending, self.same_on_ranks = Ending(store), SameOnRanks(world, store)
        number, first = (0, 0) if self.survivor is None else (self.survivor.rank, self.survivor.first)
        self.whereabouts = Whereabouts(
            world, store, shared_board(world.per_node, first, run, lambda: world.gather(None)), number
        )
        if trainer is None:
            return
        if world.size > 1:
            private.end_by(trainer, self.ending.wish)
        warning = private.warn_by(trainer, self.ending.wish)
        if warning is not None and self.requeues:
            others = [each for each in private.callbacks(trainer) if each is not self._requeue]
            self._requeue = Requeue(warning, self.ending)
            private.set_callbacks(trainer, [*others, self._requeue])

    def end_at_once(self, why: str, speaks: bool) -> None:
        """End all ranks in the midst of what they do, and say why, once. For a signal handler."""
        if speaks and not agent.speaks():
            tell(why)
        status = 128 + signal.SIGINT
        remove_parts()
        if self.survivor is not None:
            self.survivor.interrupt(why, status)
        os._exit(status)

    def requeue(self) -> None:
        """Only the first rank calls it, after all have left training."""
        if self._requeue is not None and self._requeue.saved and (reason := slurm.requeue()):
            rank_zero_warn(f"the job is saved, but Slurm did not put it back into the queue: {reason}")


class Requeue(Callback):
    """Does between two steps what Lightning does inside the signal's handler, in the midst of collectives.

    The checkpoint is Lightning's hpc_ckpt_N.ckpt in the Trainer's default_root_dir. Lightning looks there when the job
    starts again, and `fit` goes on from it. `SLURMEnvironment(auto_requeue=False)` turns it off, as in Lightning.
    """

    def __init__(self, number: int, ending: Ending) -> None:
        """`number` is the signal that warns, `ending` the end of the run, which it asks for."""
        self.number, self.ending = number, ending
        self.saved = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Save if the run ends here. All ranks come to the same answer."""
        if self.ending.look() and self.ending.signal == self.number:
            trainer.save_checkpoint(private.path_for_requeue(trainer))
            self.saved = True
