"""What a trial of a step changes, and puts back; and which names a game's code reads."""

import dis
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from types import CellType, CodeType, FunctionType
from typing import Any, NoReturn

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gan.module import GanModule
from strategies import private
from strategies.batches import random_state
from strategies.objects.content import Scope, content_of, copied, differs, kind_of
from strategies.objects.reachable import Reachable
from strategies.policies.policy import Policy

SLOW = 3.0  # seconds of this thread: a busy machine does not count
OF_TRAINER = {"callbacks", "datamodule"}
APPENDS = {"append", "appendleft", "extend", "add"}  # a log is only written


class MovesOn(Exception):
    """A trial would move on an iterator."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"a trial would move on the iterator '{name}', which cannot be put back; let batches come from "
            f"train_dataloader()"
        )


class StandIn:
    """Stands in the place of an iterator."""

    name, asked = "", False

    def __init__(self, name: str) -> None:
        self.name = name

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> NoReturn:
        self.asked = True
        raise MovesOn(self.name)

    def __getattr__(self, _: str) -> NoReturn:  # such as `send` of a generator
        self.__next__()


class Snapshot:
    """Weights, buffers, random states, and all objects that a loss can reach. See [Note: what a loss can reach].

    A trial plays with the objects themselves, not with copies: so two names of one object stay two names of it.

    An item that it takes from an iterator cannot be put back, so who asks for one ends the trial. Many iterators are
    kept and not asked: what an optimizer has used up, a counter for the names of layers. So something else stands in
    the place of each, until all is put back.
    """

    def __init__(self, game: GanModule, policies: Mapping[str, Policy]) -> None:
        since = time.thread_time()
        reachable = Reachable([game])
        self.iterators = reachable.iterators()
        elsewhere = not all(policy.runs_everywhere for policy in policies.values())  # one rank alone may ask
        # Nothing can be put in the place of an item of a tuple.
        tuples = [value for _, value in reachable.objects.values() if isinstance(value, tuple | frozenset)]
        inside = {id(item) for each in tuples for item in each}
        # With these iterators nothing is tried.
        self.untried = [name for name, each in self.iterators if elsewhere or id(each) in inside]
        functions = [value for _, value in reachable.objects.values() if isinstance(value, FunctionType)]
        if time.thread_time() - since > SLOW:
            packages = Counter((each.__module__ or "").partition(".")[0] for each in functions)
            _say_slow(max(packages, key=packages.__getitem__), *reachable.authors)
        self.read = {name for function in functions for name in _reads(function.__code__)}
        self.game, self.trainer = game, game.trainer
        self.should_stop, self.loggers = game.trainer.should_stop, game.trainer.loggers
        if OF_TRAINER & self.read:  # a loss may keep something there
            reachable = Reachable([game, *private.callbacks(game.trainer), private.datamodule(game.trainer)])
        self.buffers = dict(game.named_buffers())
        self.names = {buffer: f"buffer '{name}'" for name, buffer in self.buffers.items()}
        self.names |= {weight: f"weight '{name}'" for name, weight in game.named_parameters()}
        stored = [tensor for policy in policies.values() for tensor in policy.storage.tensors()]
        tensors = [each for each in dict.fromkeys([*self.names, *stored]) if content_of(each) is not None]
        self.values = {tensor: copied(tensor) for tensor in tensors}
        updaters = [each for policy in policies.values() for each in policy.updaters.values()]
        groups = [group for each in updaters for group in each.optimizer.param_groups]
        of_players = [part for each in updaters for part in (each.optimizer, each.schedule)]
        known, objects = set(map(id, [*tensors, *of_players])), reachable.objects.values()
        kinds = [(name, content_of(value), value) for name, value in objects if id(value) not in known]
        kinds += [("a group of an optimizer", kind_of(each), each) for each in groups]
        if data := private.datamodule(game.trainer):  # its own hooks of a batch may count; not the data set's contents
            kinds.append(("datamodule", content_of(scope := Scope(data)), scope))
        self.contents = [(name, kind, value, kind.read(value)) for name, kind, value in kinds if kind is not None]
        self.random = random_state.capture()

    def take_places(self) -> list[StandIn]:
        """Put something else in the place of each iterator, wherever the objects have it."""
        others = {id(each): StandIn(name) for name, each in self.iterators}

        def changed(item: Any) -> Any:
            return others.get(id(item), item)

        for _, kind, value, before in self.contents if others else ():
            if isinstance(value, CellType) and id(before) in others:
                kind.fill(value, changed(before))
            elif isinstance(before, list) and not others.keys().isdisjoint(map(id, before)):
                kind.fill(value, [*map(changed, before)])
            elif isinstance(before, dict) and not others.keys().isdisjoint(map(id, before.values())):
                kind.fill(value, {key: changed(item) for key, item in before.items()})
        return [*others.values()]

    def written(self) -> dict[str, Tensor]:
        """The buffers and weights that have changed since, or were replaced, by their names."""
        now: dict[Tensor, Tensor] = {}  # what stands in place of a buffer
        for name, buffer in self.game.named_buffers():
            before = self.buffers.get(name, buffer)
            now |= {before: buffer} if (before.shape, before.dtype) == (buffer.shape, buffer.dtype) else {}
        changed = [tensor for tensor, value in self.values.items() if differs(now.get(tensor, tensor), value)]
        names = {tensor: self.names.get(tensor, "a shard of the weights") for tensor in changed}
        return {name: now.get(tensor, tensor).detach().clone() for tensor, name in names.items()}

    def remembered(self) -> dict[str, Tensor]:
        """The new numbers in attributes, lists and tensors that the author's code reads, and arrays, by their names."""
        found: dict[str, Any] = {}
        for name, kind, value, before in self.contents:
            if isinstance(before, dict | list):
                both = before, kind.read(value)
                old, new = (each if isinstance(each, dict) else dict(enumerate(each)) for each in both)
                found |= {f"{name}.{key}".lstrip("."): each for key, each in new.items() if each is not old.get(key)}
            elif differs(value, before) if isinstance(value, Tensor) else isinstance(value, np.ndarray):
                found[name] = value
        # The last name in the path of an object that is no number of an item.
        last = {name: next((each for each in name.split(".")[::-1] if not each.isdigit()), "") for name in found}
        numbers = {name: _numbers(value) for name, value in found.items() if last[name] in self.read}
        return {name: each for name, each in numbers.items() if each is not None}

    def put_back(self) -> None:
        """Make everything as it was. What is as it was already is not touched."""
        for _, kind, value, before in self.contents:
            kind.fill(value, before)
        for tensor, before in self.values.items():
            kind_of(tensor).fill(tensor, before)
        self.trainer.should_stop, self.trainer.loggers = self.should_stop, self.loggers
        random_state.restore(self.random)


@cache
def _say_slow(package: str, *authors: str) -> None:
    if package not in authors:
        rank_zero_warn(
            f"each trial of a step looks through all objects of your code, which takes seconds; most are of "
            f"'{package}'. If that is not your own code, pip install it (without -e): installed packages are left out"
        )


def _numbers(value: Any) -> Tensor | None:
    """A copy of a number, tensor or array; None for other objects."""
    if isinstance(value, int | float | np.number):
        return torch.tensor(float(value), dtype=torch.float64)
    if content_of(value) is None or not isinstance(value, Tensor | np.ndarray) or value.dtype is np.dtype(object):
        return None
    return torch.as_tensor(value).detach().as_subclass(Tensor).to("cpu", torch.float64, copy=True)


@cache
def _reads(code: CodeType) -> frozenset[str]:
    """The names of attributes, globals and cells from which a function takes values."""
    loads = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL")
    orders = [(order, then) for order, then in pairwise(dis.get_instructions(code)) if order.opname.startswith(loads)]
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    own = frozenset(str(order.argval) for order, then in orders if then.argval not in APPENDS)
    return own.union(*map(_reads, inner))


def read_by_losses(game: GanModule) -> set[str]:
    """The names that the losses read, and those methods of the game that they call."""
    found, pending = set[str](), [getattr(phase.loss, "__func__", phase.loss) for phase in game.phases]
    while pending:
        code = getattr(pending.pop(), "__code__", None)
        names = frozenset() if code is None else _reads(code) - found
        pending += [getattr(type(game), name, None) for name in names]
        found |= names
    return found
