"""A share: what one rank has of a tensor, and where that lies in it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """A range of a tensor's elements, laid flat: they begin at `start` of a tensor that has the shape `shape`."""

    tensor: Tensor
    shape: torch.Size
    start: int = 0

    @classmethod
    def whole(cls, tensor: Tensor) -> "Share":
        """All of a tensor."""
        return cls(tensor.detach(), tensor.shape)

    @property
    def stop(self) -> int:
        """Where the range ends."""
        return self.start + self.tensor.numel()
