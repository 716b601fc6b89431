"""A module's dict of parameters, with a callback for each read."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn


def listen(module: nn.Module, read: Callable[[list[nn.Parameter]], None]) -> None:
    """Call `read` from now on with every parameter of a network that is about to be read."""
    for each in module.modules():
        each._parameters = Parameters(each._parameters, read)


def unlisten(module: nn.Module) -> None:
    """Undo `listen`."""
    for each in module.modules():
        if isinstance(each._parameters, Parameters):
            each._parameters = each._parameters.plain()


class Parameters(dict[str, nn.Parameter | None]):
    """A module's parameters under their names. See [Note: who reads] in unshard_on_read.py."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter | None], read: Callable[[list[nn.Parameter]], None]
    ) -> None:
        super().__init__(parameters)
        self.read = read

    def quietly(self) -> list[nn.Parameter]:
        """The parameters there are, without a call of `read`."""
        return [weight for weight in super().values() if weight is not None]

    def plain(self) -> dict[str, nn.Parameter | None]:
        """A plain dict, as torch has it."""
        return dict(super().items())

    def __getitem__(self, name: str) -> nn.Parameter | None:
        weight = super().__getitem__(name)
        if weight is not None:
            self.read([weight])
        return weight

    def values(self) -> Any:

        self.read(self.quietly())
        return super().values()

    def items(self) -> Any:

        self.read(self.quietly())
        return super().items()

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self.plain(),)  # a copy of a module has no callback
