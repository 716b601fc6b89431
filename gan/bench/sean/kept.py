"""Bytes that a forward pass keeps for the backward pass."""

from collections.abc import Iterable

import torch
from torch import Tensor


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Counts what is kept inside the `with`: shared memory once, weights not at all."""

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.weights = {weight.untyped_storage().data_ptr() for weight in weights}
        self.memory: dict[int, int] = {}
        super().__init__(self._note, lambda tensor: tensor)

    def __enter__(self) -> "Kept":
        super().__enter__()
        return self

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.weights:
            self.memory[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self.memory.values())
