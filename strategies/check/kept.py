"""The state of a game, kept during a trial and put back after it."""

import copy
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from gan.module import GanModule
from strategies import random_state
from strategies.policies.policy import Policy


class Kept:
    """The state of a game, to be put back after a trial."""

    def __init__(self, games: Sequence[GanModule], policies: Mapping[str, Policy]) -> None:
        self.modules = [module for each in games for module in each.modules()]
        self.attributes = [dict(vars(module)) for module in self.modules]
        self.buffers = [dict(module._buffers) for module in self.modules]
        self.names = {buffer: f"buffer '{name}'" for each in games for name, buffer in each.named_buffers()}
        self.names |= {weight: f"weight '{name}'" for each in games for name, weight in each.named_parameters()}
        held = [tensor for policy in policies.values() for tensor in policy.storage.held()]
        self.versions = {tensor: tensor._version for tensor in held}
        self.values = {
            tensor: tensor.detach().clone() for tensor in [*(b for each in games for b in each.buffers()), *held]
        }
        self.random = random_state.capture()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside the `with`, modules have copies of their plain attributes. What changes is put back afterwards."""
        known = {id(each): each for module in self.modules for each in (module, *module.parameters(recurse=False))}
        for module, attributes in zip(self.modules, self.attributes, strict=True):
            own = {name: value for name, value in attributes.items() if name not in _LIGHTNINGS and _is_data(value)}
            vars(module).update({name: _copied(value, known) for name, value in own.items()})
        try:
            yield
        finally:
            self._put_back()

    def written(self) -> dict[str, Tensor]:
        """The buffers and weights that have changed since the last `aside` began, by their names."""
        return {self.names.get(each, "a shard of the weights"): each.detach().clone() for each in self._changed()}

    def _changed(self) -> list[Tensor]:
        """A weight is written if its version says so. That of a buffer does not: torch's batch norm leaves it."""
        return [
            tensor
            for tensor, value in self.values.items()
            if (tensor not in self.versions or tensor._version != self.versions[tensor])
            and not torch.equal(tensor.detach(), value)
        ]

    @torch.no_grad()
    def _put_back(self) -> None:
        for module, attributes, buffers in zip(self.modules, self.attributes, self.buffers, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        for tensor in self._changed():
            tensor.copy_(self.values[tensor])
        self.versions = {tensor: tensor._version for tensor in self.versions}
        random_state.restore(self.random)


_LIGHTNINGS = frozenset(vars(GanModule()))  # attributes that every game has
_SAFE = (int, float, str, bytes, type, types.ModuleType, types.FunctionType, types.MethodType)
_LARGE = (nn.Module, nn.Parameter, Dataset, DataLoader)


def _is_data(value: Any) -> bool:
    """Whether a loss may change this object in place, so that the trial must have a copy of it."""
    return value is not None and not isinstance(value, _SAFE + _LARGE)


def _copied(value: Any, known: Mapping[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    try:
        return copy.deepcopy(value, dict(known))
    except Exception:  # noqa: BLE001, an object that cannot be copied stays as it is
        return value
