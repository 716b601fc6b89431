"""A module's dict of parameters, with callbacks for each read."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

Read = Callable[[list[nn.Parameter]], None]


def listen(modules: Iterable[nn.Module], read: Read) -> None:
    """Call `read` from now on with every parameter of these modules that is about to be read."""
    for each in modules:
        if not isinstance(each._parameters, Parameters):
            each._parameters = Parameters(each._parameters)
        each._parameters.reads.append(read)


def unlisten(modules: Iterable[nn.Module], read: Read) -> None:
    """Undo `listen`."""
    for each in modules:
        if isinstance(each._parameters, Parameters):
            each._parameters.reads.remove(read)
            if not each._parameters.reads:
                each._parameters = each._parameters.plain()


class Parameters(dict[str, nn.Parameter | None]):
    """A module's parameters under their names. See [Note: who reads] in unshard_on_read.py."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None]) -> None:
        super().__init__(parameters)
        self.reads: list[Read] = []

    def quietly(self) -> list[nn.Parameter]:
        """The parameters there are, without a callback."""
        return [weight for weight in super().values() if weight is not None]

    def plain(self) -> dict[str, nn.Parameter | None]:
        """A plain dict, as torch has it."""
        return dict(super().items())

    def _tell(self, weights: list[nn.Parameter]) -> None:
        for read in self.reads:
            read(weights)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        weight = super().__getitem__(name)
        if weight is not None:
            self._tell([weight])
        return weight

    def values(self) -> Any:
        self._tell(self.quietly())
        return super().values()

    def items(self) -> Any:
        self._tell(self.quietly())
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.plain(),)  # a copy of a module has no callback
