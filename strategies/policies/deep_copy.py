"""copy.deepcopy to another device. If something cannot be copied, the error names it."""

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping
from inspect import signature
from itertools import chain
from traceback import walk_tb
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gan.files.errors import UserError

T = TypeVar("T")

ADVICE = "type --strategy ddp"
EMPTY = CellType()


def deep_copy(
    value: T,
    known: Mapping[int, Any],
    device_for: Callable[[Any], torch.device],
    attributes: Iterable[Mapping[str, Any]],
) -> tuple[T, dict[int, tuple[nn.Module, nn.Module]]]:
    """A deep copy of a value; and the modules that were copied, each with its copy.

    `known` has the copies that exist already, by the id of the original. `device_for` gives the device for the copy of
    a tensor or a random generator. Generators and Python modules are searched in `attributes`, because deepcopy cannot
    copy them: a generator gets a new one with the same state, and a Python module is shared.
    """
    memo = dict(known)
    for each in chain.from_iterable(named.values() for named in attributes):
        if isinstance(each, torch.Generator):
            memo[id(each)] = torch.Generator(device_for(each)).set_state(each.get_state())
        elif isinstance(each, ModuleType):
            memo[id(each)] = each
    with _OnDevice(device_for):
        try:
            own = copy.deepcopy(value, memo)
        except Exception as error:
            raise UserError(
                f"strategy dp cannot copy {_path(error)} for another device: {error}; keep it outside of the game, "
                f"or {ADVICE}"
            ) from error
        copied = memo.get(id(memo), [])  # where deepcopy keeps what it has copied
        modules = {id(each): (each, memo[id(each)]) for each in copied if isinstance(each, nn.Module)}
        _refuse_functions(copied, memo)
    return own, modules


class _OnDevice(TorchFunctionMode):
    """Inside the `with`, copy.deepcopy puts each tensor's copy on its device. It also copies tensors with a graph."""

    def __init__(self, device_for: Callable[[Any], torch.device]) -> None:
        super().__init__()
        self.device_for = device_for

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.clone:  # a Parameter uses it to copy its data
            return args[0].to(self.device_for(args[0]), copy=True)
        if function is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().to(self.device_for(tensor), copy=True)
            return memo[id(tensor)]
        return function(*args, **(kwargs or {}))


def _path(error: Exception) -> str:
    """The path of attributes at which copy.deepcopy failed, from the dicts that it was copying."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code.co_name == "_deepcopy_dict"]
    keys = [frame.f_locals.get("key") for frame in frames]
    return "'" + ".".join(key for key in keys if isinstance(key, str) and key != "_modules") + "'"


def _refuse_functions(copied: Iterable[Any], memo: dict[int, Any]) -> None:
    """Refuse a function that holds an object of the first device, because deepcopy does not copy functions."""
    for container in copied:
        items = container.values() if isinstance(container, dict) else container
        for item in items if isinstance(container, (dict, list, tuple, set)) else ():
            for function in item if isinstance(item, tuple) else [item]:
                if (name := _held(function, memo, set())) is not None:
                    function = getattr(function, "__func__", function)
                    raise UserError(
                        f"strategy dp cannot copy the function {function.__qualname__}, for it holds '{name}' of the "
                        f"first device; write a method of the game that reads it from self, or {ADVICE}"
                    )


def _held(function: Any, memo: dict[int, Any], checked: set[FunctionType]) -> str | None:
    """The first name, in a function's closure or defaults, whose value would be copied: a step may change it."""
    if isinstance(function, MethodType) and not hasattr(type(function.__self__), function.__name__):
        function = function.__func__
    if not isinstance(function, FunctionType) or function in checked or function.__module__ == "gan.ranks":
        return None
    checked.add(function)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = {each.name: each.default for each in signature(function).parameters.values()}
    held |= {name: cell.cell_contents for name, cell in cells if cell != EMPTY}
    for name, value in held.items():
        own = copy.deepcopy(value, memo)
        equal = own is value or (isinstance(value, Hashable) and (own == value) is True)
        if not equal or _held(value, memo, checked) is not None:
            return name
    return None
