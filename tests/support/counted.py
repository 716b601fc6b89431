"""The bytes of all memory that tensors have, counted at every operation of torch."""

import gc
import weakref
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counted(TorchDispatchMode):
    """Inside, the bytes of tensors that operations make are counted, until their memory is freed. `peak` is the most.

    Memory that no operation has made, such as that of a process group, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, Any] = {}  # references to storages
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves((made, args)):
            self.count(each)
        self.peak = max(self.peak, self.now())
        return made

    def count(self, tensor: Any) -> None:
        # A DTensor has no memory of its own: it is about another tensor.
        if issubclass(type(tensor), Tensor) and not isinstance(tensor, DTensor) and not tensor.is_meta:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.alive:
                self.alive[storage._cdata] = weakref.ref(storage, lambda _, key=storage._cdata: self._freed(key))

    def count_all(self) -> "Counted":
        """Count the tensors of this process too, without those that `forget` has left out."""
        gc.collect()
        for each in gc.get_objects():
            self.count(each)
        return self

    def _freed(self, key: int) -> None:
        self.alive.pop(key, None)

    def now(self) -> int:
        """The bytes at this moment. A storage may have been resized."""
        return sum(storage.nbytes() for each in list(self.alive.values()) if (storage := each()) is not None)


def forget() -> None:
    """Until the process ends, `count_all` counts only what is made from now on, which the collector searches seldom."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.get_freeze_count = lambda: 1  # to count takes 50 ms, each time that a class of ours is imported by its name


def held() -> int:
    """The bytes of all memory that tensors of this process have now."""
    return Counted().count_all().now()
