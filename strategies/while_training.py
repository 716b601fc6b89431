"""What differs in this process while a game trains. Afterwards it is as it was."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from lightning import Trainer

from nets.norm import synchronised
from strategies.draws import draws_follow
from strategies.hooks import GameFirst
from strategies.processes import heap


@contextmanager
def while_training(trainer: Trainer, device: torch.device, synchronise: bool) -> Iterator[None]:
    """Inside the `with`, draws follow the samples. With `synchronise` batch norms have statistics of all ranks."""
    trainer.callbacks = [GameFirst(), *(each for each in trainer.callbacks if not isinstance(each, GameFirst))]
    # ModelCheckpoint thinks that a manual optimization wants weights from before the update.
    warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization")
    with ExitStack() as stack:
        stack.enter_context(draws_follow(device))
        if synchronise:
            stack.enter_context(synchronised())
        if device.type == "cpu" and heap.keep_freed_memory():  # see [Note: memory that is kept]
            stack.callback(heap.give_freed_memory_back)
        yield
