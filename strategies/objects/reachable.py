"""What a loss can reach and change, beside weights: the objects of the author's own code.

[Note: what a loss can reach]
From the game: attributes of modules and of other objects, items of lists, dicts, sets, deques and tuples, closures and
defaults of functions, attributes of the author's classes, and the globals that the author's functions name. Each object
is found once, whatever names it has. Not searched: functions and classes of installed packages, data sets and loaders,
optimizers, Lightning's machinery and ours. Not seen: the content of objects in which nobody keeps state, such as a
ContextVar, an array.array, a bytearray or a StringIO.
"""

import re
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.amp import autocast
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from gan.module import GanModule
from strategies.objects.content import LIGHTNINGS, Scope, in_cell, without

OURS = {"gan", "nets", "strategies", "datasets"}
INSTALLED = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
MACHINERY = ("lightning.", "strategies.", "datasets.", "torch.distributed.", "torch._", "logging.", "threading.")
MACHINERY += ("contextlib.",)  # a context manager above a function holds a generator that nobody moves on
APART = (Tensor, DataLoader, Dataset, Optimizer, LRScheduler, autocast)  # nothing is searched in them
SIMPLE = (int, float, complex, str, bytes, range, slice, Path, torch.dtype, torch.device, np.generic, type(None))
INNER = {"_modules", "_buffers", "_parameters"}  # left out of names
ONCE = ("builtins", "itertools", "torch.utils.data.dataloader")  # whose iterators cannot be put back
BOUND = (MethodType, partial, property, staticmethod, classmethod)
MANY = (list, tuple, set, frozenset, deque)


class Reachable:
    """All objects that the losses of the game, the first of the roots, can reach, by their ids.

    Each has the shortest of its names. The names in an object, class or module, and the globals of functions, are
    objects of their own: a Scope.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self.objects: dict[int, tuple[str, Any]] = {}
        self.scoped: set[int] = set()  # the owners of scopes
        self.globals: dict[int, set[str]] = {}  # by the dict of a module: the names that functions name
        self.named: set[str] = set()  # all of these, as a module may also be reached as an object
        self.of_modules: dict[int, str] = {}  # by the ids of what is in modules: its name there
        losses = [phase.loss for phase in roots[0].phases]
        authors = {str(getattr(one, "__module__", "")).partition(".")[0] for one in [*type(roots[0]).__mro__, *losses]}
        self.authors = authors - OURS - {"lightning", "torch", "builtins"}
        pending = deque(("", each) for each in [*roots, *losses] if not isinstance(each, SIMPLE))
        while pending:
            name, value = pending.popleft()
            if id(value) not in self.objects:
                self.objects[id(value)] = name, value
                for inner, child in self._inside(name, value):
                    if id(child) not in self.objects and not isinstance(child, SIMPLE):
                        pending.append((".".join(filter(None, (name, "" if inner in INNER else inner))), child))

    def iterators(self) -> list[tuple[str, Iterator]]:
        """The objects that give each item once, with their names: an item that a trial takes cannot be put back.

        In a module many are used up, such as chained weights that an optimizer has got. Code must name them.
        """
        found = [(name, value) for name, value in self.objects.values() if type(value).__module__ in ONCE]
        used = [(name, each) for name, each in found if self.of_modules.get(id(each)) in {None, *self.named}]
        return [(name, value) for name, value in used if isinstance(value, Iterator)]  # asked last: it takes longest

    def _inside(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """The objects in this one, with their names in it."""
        if isinstance(value, FunctionType):
            scope = value.__globals__
            if self._own(value.__module__ or "") or self._own(scope.get("__name__", "")):
                yield from zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
                yield from (("", each) for each in (value.__defaults__, value.__kwdefaults__, vars(value)))
            if self._own(scope.get("__name__", "")):
                names = self.globals.setdefault(id(scope), set())
                names |= _names(value.__code__)
                self.named |= names
                yield from self._in_scope(scope["__name__"], Scope(scope, partial(_among, names), scope))
        elif isinstance(value, BOUND):
            parts = ("__self__", "__func__", "func", "args", "keywords", "fget", "fset")
            yield from (("", getattr(value, part)) for part in parts if hasattr(value, part))
        elif isinstance(value, CellType):
            yield "", in_cell(value)
        elif isinstance(value, (type, ModuleType)):
            if self._own(value.__module__ if isinstance(value, type) else value.__name__):
                if isinstance(value, ModuleType):
                    self.of_modules |= {id(each): key for key, each in vars(value).items()}
                yield from self._in_scope(name or value.__name__, Scope(value, _set_by_author))
                yield from (("", base) for base in getattr(value, "__bases__", ()))
        elif not isinstance(value, APART) and not f"{type(value).__module__}.".startswith(MACHINERY):
            many = isinstance(value, MANY)
            items = dict.items(value) if isinstance(value, dict) else enumerate(value) if many else ()
            yield from ((str(key), item) for key, item in items)
            chosen = partial(without, LIGHTNINGS) if isinstance(value, GanModule) else dict
            yield from self._in_scope(name, Scope(value, chosen))
            yield "", type(value)

    def _in_scope(self, name: str, scope: Scope) -> Iterator[tuple[str, Any]]:
        if id(scope.owner) not in self.scoped:
            self.scoped.add(id(scope.owner))
            self.objects[id(scope)] = name, scope
        yield from scope.read().items()

    def _own(self, module: str) -> bool:
        return module.partition(".")[0] in self.authors or _is_own(module)


def _among(names: set[str], values: dict[str, Any]) -> dict[str, Any]:
    return {key: each for key, each in values.items() if key in names}


def _set_by_author(values: dict[str, Any]) -> dict[str, Any]:
    """What an author has put into a class or module, methods such as __call__ among it."""
    return {key: each for key, each in values.items() if not key.startswith("__") or isinstance(each, FunctionType)}


@cache
def _is_own(module: str) -> bool:
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None)
    if top in OURS or file is None:
        return module == "__main__"
    folders = Path(file).parents
    if not INSTALLED.isdisjoint(folders) or {"site-packages", "dist-packages"} & {*Path(file).parts}:
        return False
    return not any(top in _installed(folder) for folder in folders[: module.count(".") + 2])


@cache
def _installed(folder: Path) -> frozenset[str]:
    """The names of the packages that pip has put into this folder, as by --target. It lists their files beside them.

    Of a package that was installed with -e the folder of its source has no list: it may be the author's own.
    """
    lists = (each.read_text("utf-8", "replace").splitlines() for each in folder.glob("*.dist-info/RECORD"))
    return frozenset(re.split(r"[/,]", line)[0].removesuffix(".py") for each in lists for line in each)


@cache
def _names(code: CodeType) -> frozenset[str]:
    """The names that a function's code reads or writes, also in the functions inside."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*map(_names, inner))
