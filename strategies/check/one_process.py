"""A trial as one device: the game's own calls of torch.distributed and of Lightning find no other rank either."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 - it registers the backend
from lightning import Trainer

from gan import ranks
from strategies.observers import called_by_the_game, module_of


@contextmanager
def as_one_process(trainer: Trainer, found: Callable[[str], object] = str) -> Iterator[None]:
    """Inside the `with`, this rank is alone. For Lightning it keeps its number: a log may be on the first rank only.

    Our own collectives, and those of torch and DeepSpeed, go on as before. For the game each group has one rank, also
    a group that it has made. `found` hears where the game calls torch.distributed.
    """
    if not dist.is_initialized():
        with ranks.alone(in_all_threads=True):
            yield
        return
    # Its collectives return what they are given, on every kind of device.
    alone = dist.new_group([dist.get_rank()], backend="fake", use_local_synchronization=True)
    strategy: Any = trainer.strategy

    def attribute(group: dist.ProcessGroup, name: str) -> Any:
        caller = sys._getframe(1)
        # A backend that is written in Python asks for its own attributes.
        itself = type(group) is not dist.ProcessGroup and module_of(caller) == type(group).__module__
        theirs = not itself and _asked_by_the_game(caller, found)
        return object.__getattribute__(alone if theirs else group, name)

    with (
        ExitStack() as stack,
        ranks.alone(in_all_threads=True),
        mock.patch.object(dist.ProcessGroup, "__getattribute__", attribute),
        mock.patch.object(dist.ProcessGroup, "monitored_barrier", lambda *_, **__: None),  # the fake one has none
        mock.patch.object(os, "environ", os.environ | {"WORLD_SIZE": "1"}),
        mock.patch.object(type(trainer), "world_size", 1),
        mock.patch.object(strategy, "all_gather", lambda tensor, *_, **__: tensor),
        mock.patch.object(strategy, "reduce", lambda tensor, *_, **__: tensor),
    ):
        stack.callback(dist.destroy_process_group, alone)
        yield


def _asked_by_the_game(frame: FrameType | None, found: Callable[[str], object]) -> bool:
    if where := called_by_the_game(frame):
        found(where)
        return True
    while frame is not None and not module_of(frame).startswith("torch.distributed.nn"):  # in backward only the game's
        frame = frame.f_back
    return frame is not None
