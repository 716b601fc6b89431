"""What a Trainer does when Slurm warns its job: it saves between two steps, and the job goes back into the queue."""

from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn

from strategies import private
from strategies.processes import slurm
from strategies.processes.stopping import Ending


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

    def requeue(self) -> None:
        """Only the first rank calls it, after all have left training."""
        if self.saved and (reason := slurm.requeue()):
            rank_zero_warn(f"the job is saved, but Slurm did not put it back into the queue: {reason}")
