"""The buffers that a forward writes, where it runs chunk by chunk."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Buffers:
    """What a forward writes into buffers, chunk by chunk.

    Every chunk begins with the values from before the call. So a spectral norm, which one device moves once in a call,
    moves once here. Each chunk has copies of its own, because a graph may have saved them. A chunk of another stage of
    this rank has written other buffers.
    """

    def __init__(self, network: nn.Module, names: Iterable[str]) -> None:
        names = set(names)
        self.slots = [
            (f"{path}.{name}".lstrip("."), module, name, buffer)
            for path, module in network.named_modules()
            for name, buffer in module._buffers.items()
            if f"{path}.{name}".lstrip(".") in names and buffer is not None
        ]
        self.last: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Before a chunk."""
        self._note()
        for _, module, name, buffer in self.slots:
            module._buffers[name] = buffer.clone()

    def _note(self) -> None:
        for key, module, name, buffer in self.slots:
            now = module._buffers[name]
            if now is not buffer and not torch.equal(now, buffer):
                self.last[key] = now

    def written(self) -> dict[str, Tensor]:
        """The buffers that differ from before."""
        self._note()
        return self.last

    @contextmanager
    def aside(self) -> Iterator[None]:
        """After the `with`, the buffers are as before it."""
        try:
            yield
        finally:
            for _, module, name, buffer in self.slots:
                module._buffers[name] = buffer

    @contextmanager
    def kept(self) -> Iterator[None]:
        """After the `with`, the buffers have what the chunks have written."""
        with self.aside():
            yield
            self._note()
        with torch.no_grad():
            for key, _, _, buffer in self.slots:
                if key in self.last:
                    buffer.copy_(self.last[key])
