"""What torch's dispatcher sees: how much memory lives, and a game's own collectives and casts to fewer bits."""

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
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
        if function.namespace in ("c10d", "_c10d_functional") and (where := called_by_the_game()):
            self.found(where)
        return function(*args, **(kwargs or {}))


def called_by_the_game(caller: FrameType | None = None) -> str | None:
    """Where the game, or a library that it uses, calls torch.distributed now; None if somebody else does.

    `caller` is who asks, if nobody has called torch.distributed.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_back if module_of(frame).startswith(ENTRANCES) else caller
        frame = frame.f_back
    if caller is None or module_of(caller).partition(".")[0] in NOT_THE_GAME:
        return None
    return f"{caller.f_code.co_name} in {Path(caller.f_code.co_filename).name}:{caller.f_lineno}"


def module_of(frame: FrameType) -> str:
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
class Life:
    """A piece of memory: the moments in which it is made and freed, its bytes, and where it is, if not on this rank."""

    begin: int
    end: int
    bytes: int
    where: str = ""
    mark: int = 0  # of who asks: the id of a weight of which it is a gradient, say

    def is_made(self, first: int, last: int) -> bool:
        return first <= self.begin <= last


FOREVER = sys.maxsize  # the end of what is not freed yet
UNCOUNTED = Life(0, 0, 0)


class Living(TorchDispatchMode):
    """Inside the `with`, notes the lives of the memory that operations make. It works on the meta device too.

    Memory that was there before counts from the moment on that an operation returns it, so `leave_out` names it. What
    is made inside `away` has the name of where it is in its life. `saw_collective` gets each collective and its
    arguments, after it.
    """

    def __init__(
        self, leave_out: Iterable[Tensor] = (), saw_collective: Callable[[str, list[Any]], None] | None = None
    ) -> None:
        super().__init__()
        self.where = ""
        self.saw_collective = saw_collective
        self.now = 0  # each operation is a moment of its own
        self.lives: list[Life] = []
        self.saw_use: Callable[[Life], None] | None = None  # gets the life of each operand
        self._left_out = [tensor.untyped_storage() for tensor in leave_out if tensor.layout == torch.strided]
        # Of every storage: by its address in C++, which a storage has without values too.
        self._known: dict[int, tuple[Any, Life]] = {each._cdata: (None, UNCOUNTED) for each in self._left_out}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.tick()
        if self.saw_use is not None:
            for tensor in pytree.tree_leaves(args):
                if isinstance(tensor, Tensor):
                    self.saw_use(self.life(tensor))
        out = function(*args, **(kwargs or {}))
        for tensor in (out,) if isinstance(out, Tensor) else pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self._saw(tensor.untyped_storage())
        if function.namespace == "c10d" and self.saw_collective is not None:
            self.saw_collective(function.__name__, pytree.tree_leaves(args))
        return out

    def tick(self) -> int:
        """The next moment begins."""
        self.now += 1
        return self.now

    def begin(self) -> list[Life]:
        """Forget the lives that have ended. The list of the others gets those that come."""
        self.lives = [life for life in self.lives if life.end == FOREVER]
        return self.lives

    def away(self, where: str) -> AbstractContextManager[Any]:
        return mock.patch.object(self, "where", where)

    def _saw(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            life = Life(self.now, FOREVER, storage.nbytes(), self.where)
            self._known[key] = weakref.ref(storage, partial(self._gone, key)), life
            self.lives.append(life)

    def _gone(self, key: int, _: Any) -> None:
        self._end(self._known.pop(key)[1])

    def life(self, tensor: Tensor) -> Life:
        """The life of a tensor's memory. Without a storage of its own it is not counted."""
        known = self._known.get(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else None
        return UNCOUNTED if known is None else known[1]

    def forget(self, tensor: Tensor) -> None:
        """Count this tensor's memory no more."""
        self._end(self.life(tensor))

    def _end(self, life: Life) -> None:
        life.end = min(life.end, self.now)

    @property
    def highest(self) -> float:
        """The most bytes that have lived here at one time."""
        ledger = Ledger([0, self.now])
        ledger.live(0, self.lives)
        return ledger.levels().max()


class Ledger:
    """The bytes that live at each moment, in rows: one for each rank, say."""

    def __init__(self, events: Sequence[int], rows: int = 1) -> None:
        """`events` are the moments that are of interest, in order."""
        self.events, self.begin, self.last = np.array(events) - events[0], events[0], events[-1]
        self.changes = np.zeros((rows, self.last - self.begin + 2))

    def hold(self, row: int | slice, begin: int, end: int, amount: float) -> None:
        """In a row, or in several, from the first moment to the last one."""
        self.changes[row, max(begin - self.begin, 0)] += amount
        self.changes[row, min(end, self.last) - self.begin + 1] -= amount

    def live(self, row: int | slice, lives: Iterable[Life], times: float = 1) -> None:
        for life in lives:
            self.hold(row, life.begin, life.end, times * life.bytes)

    def levels(self) -> np.ndarray:
        """The bytes when the events happen, and then the most of each until the next one."""
        held = self.changes[:, :-1].cumsum(1)
        return np.concatenate([held[:, self.events], np.maximum.reduceat(held, self.events, 1)], 1)
