"""What is in an object of the author's: how it is read, whether it has changed, and how it is put back."""

import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import cache, partial
from types import CellType, MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gan.files.checkpoint import checksum
from gan.module import GanModule
from strategies.sharding.resharded_parameter import resharded, version_of

PLAIN = (bool, int, float, complex, str, bytes, type(None))
TORCHS = frozenset(vars(nn.Module())) - {"training"}  # attributes that every module has
LIGHTNINGS = frozenset(vars(GanModule()).keys() - vars(nn.Module()).keys())  # attributes that every game has
INTERNAL = TORCHS | LIGHTNINGS
EMPTY = CellType()
CACHE = type(cache(bool))
LISTS = (list, dict, set, deque)


class Content(NamedTuple):
    """How the content of an object is read, and put back. `fill` does nothing if the content is the same."""

    read: Callable[[Any], Any]
    fill: Callable[[Any, Any], object]


class Scope:
    """Names with values: attributes of an object, a class or a module, or those globals that functions name."""

    def __init__(
        self, owner: Any, chosen: Callable[[dict[str, Any]], Any] = dict, values: dict[str, Any] | None = None
    ) -> None:
        """`chosen` takes those that count out of the `values`: the owner's attributes, if nothing else is said."""
        self.owner, self.chosen = owner, chosen
        self.values = getattr(owner, "__dict__", {}) if values is None else values
        self.slots = () if isinstance(owner, type | dict) else _slots(type(owner))

    def read(self) -> dict[str, Any]:
        slots = {name: getattr(self.owner, name) for name in self.slots if hasattr(self.owner, name)}
        return slots | self.chosen(dict(self.values))

    def fill(self, content: Mapping[str, Any]) -> None:
        """Give the names these values, and no value to others."""
        now, plain = self.read(), type(self.values) is dict  # not so for a class
        for name in now.keys() - content.keys():
            self.values.pop(name) if plain and name not in self.slots else delattr(self.owner, name)
        for name, value in content.items():
            if name not in now or now[name] is not value:
                if plain and name not in self.slots:
                    self.values[name] = value
                else:
                    setattr(self.owner, name, value)


def without(names: frozenset[str], values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


@cache
def _slots(kind: type) -> tuple[str, ...]:
    """The names of slots, of the classes that Python code defines: those of compiled ones may be read-only."""
    own = (base for base in kind.__mro__ if "__slots__" in vars(base))
    return tuple(name for base in own for name, each in vars(base).items() if isinstance(each, MemberDescriptorType))


def content_of(value: Any) -> Content | None:
    """How the content of this object is read and filled; None if nothing in the object itself can change."""
    if (content := _content_of_type(type(value))) is None:
        return None
    if isinstance(value, Tensor) and (resharded(value) or value.is_meta or value.layout != torch.strided):
        return None
    if isinstance(value, np.ndarray) and not value.flags.writeable:  # as of a file that is mapped into memory
        return None
    return content


@cache
def _content_of_type(kind: type) -> Content | None:
    return next((content for each, content in CONTENTS.items() if issubclass(kind, each)), None)


def kind_of(value: Any) -> Content:
    """The same for an object of which it is known that something in it can change."""
    found = content_of(value)
    assert found is not None
    return found


def noted(value: Any, by_version: bool = False) -> Any:
    """What tells by `alike` whether something in an object has changed; None if nothing in it can.

    It has the members of a container, and a checksum of an array or tensor; by version, how often a tensor was written.
    """
    if by_version and isinstance(value, Tensor):
        return version_of(value)
    if (content := content_of(value)) is None:
        return None
    if isinstance(value, Tensor):
        return tuple(value.shape), checksum(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return value.shape, checksum(torch.from_numpy(value))
    return content.read(value)


class Attributed:
    """What modules and other objects keep in attributes: a counter, or what another network has made, as in MUNIT.

    `lists`: the lists, dicts and sets in attributes are put back, too, as those that hooks fill with features.
    """

    def __init__(self, owners: Iterable[Any], lists: bool = False) -> None:
        self.lists = LISTS if lists else ()
        self.scopes: list[Scope] = []
        self.before: list[dict[str, Any]] = []
        self.notes: list[tuple[str, Any, Any]] = []  # of what may change in place
        self.add(owners)

    def add(self, owners: Iterable[Any], largest: float = math.inf) -> None:
        """Of lists with more items than the `largest` nothing is noted, as of a log that the game keeps."""
        for scope in (Scope(each, partial(without, INTERNAL)) for each in owners):
            values, kind = scope.read(), type(scope.owner).__name__
            found = [] if isinstance(scope.owner, nn.Module) else [(f"a {kind}", scope.owner)]
            found += [(f"the attribute '{n}' of a {kind}", v) for n, v in values.items() if not isinstance(v, PLAIN)]
            watched = (each for each in found if not isinstance(each[1], LISTS) or len(each[1]) <= largest)
            self.notes += [(what, each, note) for what, each in watched if (note := noted(each, True)) is not None]
            self.scopes.append(scope)
            self.before.append(values)

    def put_back(self) -> None:
        """Let the modules have these attributes, and no others."""
        for scope, values in zip(self.scopes, self.before, strict=True):
            scope.fill(values)
        for _, value, note in self.notes:
            if isinstance(value, self.lists):
                kind_of(value).fill(value, note)

    def written(self) -> str | None:
        """An attribute whose object has changed since, and is not put back, though it was not assigned anew."""
        others = (note for note in self.notes if not isinstance(note[1], self.lists))
        return next((where for where, value, note in others if not alike(noted(value, True), note)), None)


def copied(tensor: Tensor) -> Tensor:
    """A copy on the CPU, for a GPU may not have room for all weights twice."""
    return tensor.detach().as_subclass(Tensor).to("cpu", copy=True)


@torch.no_grad()
def _fill_tensor(tensor: Tensor, before: Tensor) -> None:
    if tensor.shape != before.shape:  # changed through `.data`
        tensor.data = before.to(tensor.device)
    elif differs(tensor, before):
        tensor.detach().copy_(before)


def differs(tensor: Tensor, before: Tensor) -> bool:
    """Whether a tensor has other values than its copy. Its version does not count what is written through `.data`."""
    now = tensor.detach().as_subclass(Tensor).cpu()
    return not torch.equal(now, before) and (now.shape != before.shape or not bool(same_numbers(now, before).all()))


def same_numbers(one: Tensor, other: Tensor) -> Tensor:
    """Where two tensors are equal. An author may keep NaN for what is not known yet: that is equal to NaN."""
    return (one == other) | ((one != one) & (other != other))


def alike(one: Any, other: Any) -> bool:
    """Whether two contents are the same: equal numbers and text, and of all else the same objects."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, Tensor):
        known = not (one.is_meta or other.is_meta) and one.dtype == other.dtype
        return known and torch.equal(copied(one), copied(other))
    if isinstance(one, np.ndarray):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and one.tobytes() == other.tobytes()
    return same(one, other)


def same(one: Any, other: Any) -> bool:
    """Whether they are one object, or an equal number or text."""
    return one is other or (type(one) is type(other) and isinstance(one, PLAIN) and one == other)


def _filler(add: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def fill(value: Any, before: Any) -> None:
        now = list(value)
        if len(now) != len(before) or any(one is not other for one, other in zip(now, before, strict=True)):
            value.clear()
            add(value, before)

    return fill


def _fill_dict(value: dict[Any, Any], before: Mapping[Any, Any]) -> None:
    if list(value) != list(before) or any(dict.__getitem__(value, key) is not each for key, each in before.items()):
        kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        kind.clear(value)
        kind.update(value, before)


def in_cell(cell: CellType) -> Any:
    return EMPTY if cell == EMPTY else cell.cell_contents


def _fill_cell(cell: CellType, before: Any) -> None:
    if before is not EMPTY:
        cell.cell_contents = before
    elif cell != EMPTY:
        del cell.cell_contents


def _fill_cache(kept: Any, misses: int) -> None:
    if kept.cache_info().misses != misses:  # single results cannot be taken out; all are computed again when asked for
        kept.cache_clear()


def _state(name: str) -> Content:
    return Content(lambda dice: getattr(dice, f"get{name}")(), lambda dice, state: getattr(dice, f"set{name}")(state))


def _fill_state(value: Any, before: Any) -> None:
    if not alike(value.state_dict(), before):
        value.load_state_dict(deepcopy(before))


CONTENTS: dict[type | tuple[type, ...], Content] = {
    Scope: Content(Scope.read, Scope.fill),
    Tensor: Content(copied, _fill_tensor),
    np.ndarray: Content(lambda value: value.copy(), lambda value, before: value.__setitem__(..., before)),
    np.random.Generator: Content(
        lambda value: value.bit_generator.state, lambda value, state: setattr(value.bit_generator, "state", state)
    ),
    (torch.Generator, np.random.RandomState): _state("_state"),
    random.Random: _state("state"),
    OrderedDict: Content(lambda value: dict(OrderedDict.items(value)), _fill_dict),
    dict: Content(lambda value: dict(dict.items(value)), _fill_dict),
    list: Content(list, _filler(list.extend)),
    deque: Content(list, _filler(deque.extend)),
    set: Content(list, _filler(set.update)),
    CACHE: Content(lambda kept: kept.cache_info().misses, _fill_cache),
    (Optimizer, LRScheduler): Content(lambda value: deepcopy(value.state_dict()), _fill_state),  # not a player's
    CellType: Content(in_cell, _fill_cell),
}
