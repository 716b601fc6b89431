"""What the code of a game does, as torch's dispatcher sees it: collectives of its own, and casts to fewer bits."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Whoever calls torch.distributed does so through these modules. They may call each other, and modes in between.
ENTRANCES = tuple(
    f"torch.distributed.{name}" for name in ("distributed_c10d", "c10d_logger", "nn", "_functional_collectives")
)
NOT_THE_GAME = {"torch", "lightning", "deepspeed", "gan", "nets", "datasets", "strategies"}


class OwnCollectives(TorchDispatchMode):
    """Tells `found` of collectives that the game, or a library that it uses, calls past gan.ranks, before they run."""

    def __init__(self, found: Callable[[str], object]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            frame: FrameType | None = sys._getframe()
            caller: FrameType | None = None
            while frame is not None:
                caller = frame.f_back if _module(frame).startswith(ENTRANCES) else caller
                frame = frame.f_back
            if caller is not None and _module(caller).partition(".")[0] not in NOT_THE_GAME:
                self.found(f"{caller.f_code.co_name} in {Path(caller.f_code.co_filename).name}:{caller.f_lineno}")
        return function(*args, **(kwargs or {}))


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


class Casts(TorchDispatchMode):
    """Notes the floating-point types in which a game computes after having had more bits, and all of half precision."""

    def __init__(self, dtypes: set[torch.dtype] | None = None) -> None:
        """`dtypes` is where they are noted."""
        super().__init__()
        self.dtypes = set() if dtypes is None else dtypes

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.is_floating_point():
            given = [each for each in args if isinstance(each, Tensor) and each.is_floating_point()]
            if made.dtype.itemsize < 4 or any(made.dtype.itemsize < each.dtype.itemsize for each in given):
                self.dtypes.add(made.dtype)
        return made
