"""What the CPU must know of the device's values, but need not wait for at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gan.files.loading import not_compiled

_asked: ContextVar[list[tuple[Tensor, Callable[[list[float]], Any]]] | None] = ContextVar("asked", default=None)


@not_compiled
def read(values: Tensor, told: Callable[[list[float]], Any]) -> None:
    """Call `told` with the values: at once, or in a phase before its update, when the CPU waits for the device anyway.

    `told` may raise what the values show to be wrong. Whole numbers arrive exactly up to 2**24.
    """
    asked = _asked.get()
    if values.is_meta:  # a plan plays without values, and nothing is wrong there
        return
    if asked is None:
        told(values.tolist())
    else:
        asked.append((values, told))


@contextmanager
def together() -> Iterator[None]:
    """Inside the `with`, `read` waits for `now`, or for the end."""
    token = _asked.set([])
    try:
        yield
        now()
    finally:
        _asked.reset(token)


def now() -> None:
    """Wait for the device, once for all that was to be read."""
    asked = _asked.get()
    if not asked:
        return
    tensors, told = zip(*asked, strict=True)
    asked.clear()  # what is told may ask again
    if len(told) == 1:
        told[0](tensors[0].tolist())
        return
    device = tensors[-1].device
    parts = [(each if each.is_floating_point() else each.float()).to(device, non_blocking=True) for each in tensors]
    values = iter(torch.cat(parts).tolist())
    for part, tell in [(list(islice(values, len(each))), tell) for each, tell in zip(parts, told, strict=True)]:
        tell(part)
