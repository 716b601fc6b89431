"""How many bytes of memory live that operations have made."""

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
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
