"""Which attributes of a network's modules have changed, on this rank."""

from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

# torch's own, which policies change too; those of an author count, also private ones.
TORCHS = frozenset({*vars(nn.Module()), "_flat_weights"} - {"training"})
PLAIN = (int, float, complex, str, bytes, bool)


class Attributes:
    """Notices what calls of a network, or code around it, have set in its modules.

    A list or a dict has changed if it has other members, and an object if it has other attributes. A buffer has changed
    if it was written.
    """

    def __init__(self, network: nn.Module) -> None:
        self.modules = dict(network.named_modules())
        self.before = {name: _state(module) for name, module in self.modules.items()}

    def replaced(self, network: nn.Module) -> str | None:
        """The name of a module that is no longer the one that was there."""
        now = dict(network.named_modules())
        names = (name for name in {**self.modules, **now} if self.modules.get(name) is not now.get(name))
        return next(names, None)

    def changed(self) -> dict[tuple[str, str], Any]:
        """What has changed since this was asked last, by module and name."""
        found = {}
        for name, module in self.modules.items():
            before, now = self.before[name], _state(module)
            found |= {(name, key): mark[0] for key, mark in now.items() if not _same(mark, before.get(key))}
            self.before[name] = now
        return found

    def set(self, values: dict[tuple[str, str], Any]) -> None:
        """Set what has changed on another rank. It does not count as changed here."""
        for (name, key), value in values.items():
            module = self.modules[name]
            if key in module._buffers:
                module._buffers[key] = value
            else:
                vars(module)[key] = value
        self.changed()

    def forget(self, names: list[tuple[str, str]]) -> None:
        """Remove what is only on another rank. To read it here is an AttributeError."""
        for name, key in names:
            module = self.modules[name]
            vars(module).pop(key, None)
            module._buffers.pop(key, None)
        self.changed()


def _state(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """For each attribute its value, and what tells whether it has changed. The value keeps its id from being reused."""
    own = {key: value for key, value in vars(module).items() if key not in TORCHS}
    state = {key: _mark(value) for key, value in own.items() if not isinstance(value, FunctionType | MethodType)}
    return state | {key: _mark(value) for key, value in module._buffers.items()}


def _mark(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return value, id(value), None if value.is_inference() else value._version
    if isinstance(value, PLAIN):
        return value, type(value), value
    if isinstance(value, list | tuple | set):
        return value, id(value), [id(each) for each in value], list(value)
    if isinstance(value, dict):
        return value, id(value), [(key, id(each)) for key, each in value.items()], list(value.values())
    if hasattr(value, "__dict__") and not isinstance(value, nn.Module | ModuleType | type):
        return value, *_mark(vars(value))[1:]
    return value, id(value)


def _same(mark: tuple[Any, ...], before: tuple[Any, ...] | None) -> bool:
    return before is not None and mark[1:3] == before[1:3]
