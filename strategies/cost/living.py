"""How many bytes of memory live that operations have made."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class Living(TorchDispatchMode):
    """Inside the `with`, counts the memory that operations make, until it is freed. It works on the meta device too.

    Memory that was there before counts from the moment on that an operation returns it, so `leave_out` names it.
    """

    def __init__(self, leave_out: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.alive = 0
        self.highest = 0  # since the last `reset`
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
        self.highest = max(self.highest, self.alive)
        return out

    def _saw(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self.alive += size

        def gone(_: Any) -> None:
            if self._known.pop(key, None) is not None:
                self.alive -= size

        self._known[key] = weakref.ref(storage, gone)

    def forget(self, tensor: Tensor) -> bool:
        """Count this tensor's memory no more: it is counted elsewhere. Returns whether it was counted."""
        storage = tensor.untyped_storage()
        if self._known.get(storage._cdata) is None:
            return False
        self._known[storage._cdata] = None
        self._left_out.append(storage)
        self.alive -= storage.nbytes()
        return True

    def reset(self) -> None:
        self.highest = self.alive
