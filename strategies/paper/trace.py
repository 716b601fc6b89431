"""What happens in a phase, in order, without its values: which weights are read, and how much memory lives."""

import weakref
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Count:
    """Bytes that live now, and the most of them since the last `reset`."""

    alive: int = 0
    highest: int = 0


class Living(TorchDispatchMode):
    """Inside the `with`, counts the memory that operations make, until it is freed. It works on the meta device too.

    Memory that was there before counts from the moment on that an operation returns it, so `leave_out` names it. What
    is made inside `away` is counted apart, by the name of where it is.
    """

    def __init__(self, leave_out: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.here = Count()
        self.there: dict[str, Count] = defaultdict(Count)
        self._count = self.here
        self.reduced = 0  # the payload of collectives, in bytes: in losses they all are all-reduces
        self._left_out = [tensor.untyped_storage() for tensor in leave_out if tensor.layout == torch.strided]
        self._known: dict[int, Any] = {storage._cdata: None for storage in self._left_out}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            self.reduced += sum(each.nbytes for each in pytree.tree_leaves(args) if isinstance(each, Tensor))
        for tensor in pytree.tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self._saw(tensor.untyped_storage())
        self._count.highest = max(self._count.highest, self._count.alive)
        return out

    @contextmanager
    def away(self, where: str) -> Iterator[None]:
        before, self._count = self._count, self.there[where]
        try:
            yield
        finally:
            self._count = before

    @property
    def is_away(self) -> bool:
        return self._count is not self.here

    def _saw(self, storage: torch.UntypedStorage) -> None:
        key, size, count = storage._cdata, storage.nbytes(), self._count
        if key in self._known:
            return
        count.alive += size

        def gone(_: Any) -> None:
            if self._known.pop(key, None) is not None:
                count.alive -= size

        self._known[key] = weakref.ref(storage, gone)

    def forget(self, tensor: Tensor) -> bool:
        """Count this tensor's memory no more: it is counted by others. Returns whether it was counted here."""
        storage = tensor.untyped_storage()
        if self._known.get(storage._cdata) is None:
            return False
        self._known[storage._cdata] = None
        self._left_out.append(storage)
        self.here.alive -= storage.nbytes()
        return True

    def reset(self) -> None:
        for count in (self.here, *self.there.values()):
            count.highest = count.alive


# What may happen, and what `what` is then.
BEGIN = "begin"  # of the phase
ENTER = "enter"  # a module's forward begins: the module
LEAVE = "leave"  # the innermost forward ends
READ = "read"  # weights are read: a tuple of their ids
BACKWARD = "backward"  # a backward begins: whether it is the phase's last one
NEED = "need"  # the backward needs a weight: its id
GRADIENT = "gradient"  # backward has added up the gradient of a weight: its id
AGAIN = "again"  # backward computes the forward of a block again
FINISH = "finish"  # the rest of the reduction of a learner: its name
UPDATE = "update"  # a learner's step: its name
DROP = "drop"  # of a learner's gradients: its name
END = "end"  # of the phase


@dataclass
class Event:
    """`alive` bytes of activations live when it happens, and `highest` is the most of them until the next event.

    `there`: the same on ranks that serve players, for the calls of one rank, by the numbers of those ranks.
    `passed`: the bytes of the tensors that a forward gets or returns; `learns`: a gradient comes back to them.
    """

    kind: str
    what: Any
    alive: int
    highest: int
    there: dict[str, Count] = field(default_factory=dict)
    passed: int = 0
    learns: bool = False


@dataclass
class Asked:
    """Bytes of the tensors that go to other ranks, and of those that come back."""

    sent: int = 0
    returned: int = 0


@dataclass
class Trace:
    """A phase as it was played once. Activations are all memory but weights, their gradients and optimizers' states.

    `reduced`: bytes that the game itself sums over all ranks, in losses and in synchronised batch norms. `asked`: what
    goes to the ranks that serve a player and comes back, by player. `resting`: the most bytes of activations that live
    on ranks that serve between two calls of a rank, for its backward.
    """

    phase: str
    second_order: bool
    learners: tuple[str, ...]
    every: int = 1
    events: list[Event] = field(default_factory=list)
    reduced: int = 0
    asked: dict[str, Asked] = field(default_factory=dict)
    resting: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, what: Hashable | nn.Module = None, alive: int = 0) -> None:
        self.events.append(Event(kind, what, alive, alive))
