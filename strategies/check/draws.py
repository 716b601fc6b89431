"""Draws from torch's own generators, made comparable for a trial.

In training each rank draws other numbers, and one device would draw others again. So a phase that draws could not be
compared. In a trial a sample gets the same numbers wherever it is: each draw is made for all rows of the global batch,
from a seed that all ranks share, and a rank takes its own rows of it. A draw without a row for each sample is the same
on all ranks. The generators are left as they were.
"""

import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gan import noise
from strategies import random_state

# Operations whose rows are drawn one by one. Others, such as dropout within attention, keep the state of a generator
# for their backward, so they cannot be exchanged.
BY_ROWS = {
    *("randn", "rand", "randint", "randn_like", "rand_like", "randint_like", "randperm", "multinomial", "poisson"),
    *("normal", "normal_", "uniform_", "random_", "exponential_", "cauchy_", "log_normal_", "geometric_"),
    *("bernoulli", "bernoulli_", "native_dropout", "rrelu_with_noise", "_standard_gamma"),
}
_ONE_BY_ONE = threading.Lock()  # the threads of dp share one generator


class DrawsOfSamples(TorchDispatchMode):
    """Inside, a sample draws the same numbers on any number of ranks."""

    def __init__(self, phase: str) -> None:
        super().__init__()
        self.phase = phase
        self.drawn: list[str] = []  # the draws so far, as text

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        name = function.overloadpacket.__name__
        if name not in BY_ROWS or torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **kwargs)
        shape = _shape(args)
        seed = noise.seed_for("trial", self.phase, len(self.drawn))
        self.drawn.append(f"{name} of {list(shape)}")
        kwargs.pop("generator", None)  # one of the author's own would be another one after the trial
        overload = function._overloadname.replace("generator", "").strip("_")
        function = getattr(function.overloadpacket, overload or "default")
        with _ONE_BY_ONE, random_state.untouched():
            torch.manual_seed(seed)
            return _own_rows(function, args, kwargs, shape)


def _shape(args: tuple) -> tuple[int, ...]:
    """The shape of what is drawn: that of the first tensor, or the size that is asked for."""
    for arg in args:
        if isinstance(arg, Tensor):
            return tuple(arg.shape)
        if isinstance(arg, list | tuple):
            return tuple(arg)
    return ()


def _own_rows(function: Any, args: tuple, kwargs: dict[str, Any], shape: tuple[int, ...]) -> Any:
    """Make a draw for all rows of the global batch, and return this rank's own ones."""
    place, n = noise.here(), shape[0] if shape else 0
    own = place.numbers(n) if place is not None and n else range(0)
    if not own or n % len(own):
        return function(*args, **kwargs)
    total = place.total // place.rows * len(own)
    rows = torch.tensor([copy * total + number for copy in range(n // len(own)) for number in own])
    wide_rows = n // len(own) * total
    originals: dict[int, Tensor] = {}

    def widen(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim and len(value) == n:
            wide = value[torch.arange(wide_rows, device=value.device) % n]
            wide[rows.to(value.device)] = value
            originals[id(wide)] = value
            return wide
        if isinstance(value, list | tuple) and tuple(value) == shape:
            return [wide_rows, *shape[1:]]
        return value

    wide_args = tuple(widen(arg) for arg in args)
    found = function(*wide_args, **kwargs)
    for argument, wide in zip(function._schema.arguments, wide_args, strict=False):
        if argument.is_write and id(wide) in originals:
            originals[id(wide)].copy_(wide[rows.to(wide.device)])

    def narrow(value: Any) -> Any:
        if id(value) in originals:
            return originals[id(value)]
        return value[rows.to(value.device)] if isinstance(value, Tensor) and len(value) == wide_rows else value

    return pytree.tree_map(narrow, found)
