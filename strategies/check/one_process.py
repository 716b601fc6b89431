"""A trial as one device: the game's own calls of torch.distributed and of Lightning find no other rank either."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 - it registers the backend
from lightning import Trainer
from torch.distributed.distributed_c10d import GroupMember

from gan import ranks
from strategies.observers import called_by_the_game, module_of


@contextmanager
def as_one_process(trainer: Trainer, found: Callable[[str], object] = str) -> Iterator[None]:
    """Inside the `with`, this rank is alone. For Lightning it keeps its number: a log may be on the first rank only.

    Our own collectives, and those of torch and DeepSpeed, go on as before; so does a group that the game has made.
    `found` hears where the game calls torch.distributed.
    """
    if not dist.is_initialized():
        with ranks.alone(in_all_threads=True):
            yield
        return
    # Its collectives return what they are given, on every kind of device.
    alone = dist.new_group([dist.get_rank()], backend="fake", use_local_synchronization=True)
    assert isinstance(alone, dist.ProcessGroup)
    kind = type(GroupMember)
    usual: Any = kind.WORLD
    strategy: Any = trainer.strategy

    def default_group(group: Any) -> Any:
        frame = sys._getframe(1)
        return alone if _asked_by_the_game(frame, found) and not _of_another(frame, alone) else usual.fget(group)

    with (
        ExitStack() as stack,
        ranks.alone(in_all_threads=True),
        mock.patch.object(kind, "WORLD", property(default_group, usual.fset)),
        mock.patch.object(type(trainer), "world_size", 1),
        mock.patch.object(strategy, "all_gather", lambda tensor, *_, **__: tensor),
        mock.patch.object(strategy, "reduce", lambda tensor, *_, **__: tensor),
    ):
        stack.callback(dist.destroy_process_group, alone)
        yield


def _asked_by_the_game(frame: FrameType | None, found: Callable[[str], object]) -> bool:
    if where := called_by_the_game():
        found(where)
        return True
    while frame is not None and not module_of(frame).startswith("torch.distributed.nn"):  # in backward only the game's
        frame = frame.f_back
    return frame is not None


def _of_another(frame: FrameType | None, alone: dist.ProcessGroup) -> bool:
    """Whether torch.distributed was given a group of the game's own."""
    while frame is not None and module_of(frame).startswith("torch.distributed"):
        if isinstance(given := frame.f_locals.get("group"), dist.ProcessGroup) and given is not alone:
            return True
        frame = frame.f_back
    return False
