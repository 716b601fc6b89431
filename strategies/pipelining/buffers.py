"""What a forward writes into its modules, where it runs chunk by chunk."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, str)


class Buffers:
    """What a forward writes into buffers, chunk by chunk.

    Every chunk begins with the values from before the call. So a spectral norm, which one device moves once in a call,
    moves once here. Each chunk has copies of its own, because a graph may have saved them. A chunk of another stage of
    this rank has written other buffers.

    The same holds for numbers and other plain attributes, such as a count of calls: the author's Python runs for each
    chunk, and in the end each attribute is as after one forward.
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
        self.modules = list(network.modules())
        self.attributes = [_plain(module) for module in self.modules]

    def begin(self) -> None:
        """Before a chunk."""
        self._note()
        self._restore_attributes()
        for _, module, name, buffer in self.slots:
            module._buffers[name] = buffer.clone()

    def _restore_attributes(self) -> None:
        for module, before in zip(self.modules, self.attributes, strict=True):
            now = _plain(module)
            if now != before:
                for name in now.keys() - before.keys():
                    del vars(module)[name]
                vars(module).update(before)

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
    def undone(self) -> Iterator[None]:
        """After the `with`, buffers and attributes are as before it."""
        with self.aside():
            yield
        self._restore_attributes()

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


def _plain(module: nn.Module) -> dict[str, Any]:
    """A module's attributes that are numbers, strings and the like."""
    return {name: value for name, value in vars(module).items() if value is None or type(value) in PLAIN}
