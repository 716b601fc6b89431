"""How callbacks compute with a game between two steps, so that training does not notice, and log what they find."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning import Trainer

from strategies import random_state
from strategies.strategy import phase_strategy


@contextmanager
def computing(trainer: Trainer, game: Any, averaged: bool = True) -> Iterator[Callable[[Any], Any]]:
    """Inside the `with`, networks are in evaluation mode, without gradients, with averaged weights if asked for.

    Gives a function that brings a batch to the device. All ranks must enter, because a sharded player needs them all.
    """
    modes = [(module, module.training) for module in game.modules()]
    game.eval()
    try:
        with (
            torch.no_grad(),
            random_state.untouched(),
            game.averaged() if averaged else phase_strategy(trainer).gathered(),
            trainer.precision_plugin.forward_context(),
        ):
            yield lambda batch: trainer.precision_plugin.convert_input(trainer.strategy.batch_to_device(batch))
    finally:
        for module, mode in modes:
            module.training = mode


def log(trainer: Trainer, found: Mapping[str, float]) -> None:
    """Log what was found after the last step."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(found), row_of(trainer))


def row_of(trainer: Trainer) -> int:
    """The row in which Lightning logs the last step."""
    return max(0, trainer.global_step - 1)
