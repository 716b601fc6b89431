"""What torch's dispatcher sees: how much memory lives, and a game's own collectives and casts to fewer bits."""

import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
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
        super().__init__()
        self.dtypes = set() if dtypes is None else dtypes

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.is_floating_point():
            given = [each for each in args if isinstance(each, Tensor) and each.is_floating_point()]
            if made.dtype.itemsize < 4 or any(made.dtype.itemsize < each.dtype.itemsize for each in given):
                self.dtypes.add(made.dtype)
        return made


@dataclass(eq=False)
class Count:
    """Bytes that live now, and the most of them since the last `reset`."""

    alive: int = 0
    highest: int = 0


class Living(TorchDispatchMode):
    """Inside the `with`, counts the memory that operations make, until it is freed. It works on the meta device too.

    Memory that was there before counts from the moment on that an operation returns it, so `leave_out` names it. What
    is made inside `away` is counted apart, by the name of where it is. `saw_collective` gets each collective and its
    arguments, after it.
    """

    def __init__(
        self, leave_out: Iterable[Tensor] = (), saw_collective: Callable[[str, list[Any]], None] | None = None
    ) -> None:
        super().__init__()
        self.here = Count()
        self.there: dict[str, Count] = defaultdict(Count)
        self.saw_collective = saw_collective
        self.now = 0  # each operation is a moment of its own
        # Of what is made here: the moments of its beginning and end, its bytes, and a mark of who asks.
        self.lives: list[list[int]] = []
        self.saw_use: Callable[[list[int]], None] | None = None  # gets the life of each operand
        self._count = self.here
        self._left_out = [tensor.untyped_storage() for tensor in leave_out if tensor.layout == torch.strided]
        # Every storage, with what counts it: by its address in C++, which a storage has without values too.
        self._known: dict[int, tuple[Any, list[Count], list[int]]] = {e._cdata: (None, [], []) for e in self._left_out}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.now += 1
        if self.saw_use is not None:
            for tensor in pytree.tree_leaves(args):
                if isinstance(tensor, Tensor) and (life := self.life(tensor)):
                    self.saw_use(life)
        out = function(*args, **(kwargs or {}))
        for tensor in (out,) if isinstance(out, Tensor) else pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self._saw(tensor.untyped_storage())
        self._count.highest = max(self._count.highest, self._count.alive)
        if function.namespace == "c10d" and self.saw_collective is not None:
            self.saw_collective(function.__name__, pytree.tree_leaves(args))
        return out

    def away(self, where: str) -> AbstractContextManager[Any]:
        return mock.patch.object(self, "_count", self.there[where])

    @property
    def is_away(self) -> bool:
        return self._count is not self.here

    def _saw(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            life = [self.now, sys.maxsize, size, 0]
            self._known[key] = weakref.ref(storage, partial(self._gone, key, size)), [self._count], life
            self._count.alive += size
            if not self.is_away:
                self.lives.append(life)

    def _gone(self, key: int, size: int, _: Any) -> None:
        _, counts, life = self._known.pop(key)
        life[1] = min(life[1], self.now)
        for count in counts:
            count.alive -= size

    def _of(self, tensor: Tensor) -> tuple[Any, list[Count], list[int]]:
        """What is known of a tensor's memory. Without a storage of its own it is not counted."""
        known = self._known.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
        return known or (None, [], [])

    def life(self, tensor: Tensor) -> list[int]:
        """The life of a tensor's memory. Empty if it is not counted."""
        return self._of(tensor)[2]

    def forget(self, tensor: Tensor) -> None:
        """Count this tensor's memory no more."""
        _, counts, life = self._of(tensor)
        life[1:2] = [self.now]
        while counts:
            counts.pop().alive -= tensor.untyped_storage().nbytes()

    def count_too(self, tensor: Tensor, count: Count) -> None:
        """Count this tensor's memory, if it is counted, in this count as well."""
        counts = self._of(tensor)[1]
        if counts and count not in counts:
            counts.append(count)
            count.alive += tensor.untyped_storage().nbytes()

    def reset(self) -> None:
        for count in (self.here, *self.there.values()):
            count.highest = count.alive
