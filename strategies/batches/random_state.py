"""The states of one rank's random generators, in types that checkpoints can have."""

import random
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The states of torch (for the CPU, and for this rank's accelerator by its type), NumPy and Python."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "accelerator": _of_accelerator(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "python": random.getstate(),
    }


def restore(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    for kind in _of_accelerator().keys() & state["accelerator"].keys():
        torch.get_device_module(kind).set_rng_state(state["accelerator"][kind])
    restore_alike(state)


def _of_accelerator() -> dict[str, torch.Tensor]:
    """The state of this rank's accelerator by its type. Empty until this process uses it: asking would wake it."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return {}
    module = torch.get_device_module(found)
    if not getattr(module, "is_initialized", lambda: True)():
        return {}
    # Some devices let only torch itself call their module's function, where torch has one for all (2.13).
    return {found.type: getattr(torch.accelerator, "random", module).get_rng_state()}


def restore_alike(state: Mapping[str, Any]) -> None:
    """Restore the generators of NumPy and Python alone."""
    kind, keys, *rest = state["numpy"]
    set_dice((state["python"], kind, keys.numpy().astype(np.uint32), *rest))


def dice() -> tuple[Any, ...]:
    """The states of NumPy and Python's random, which are the same on all ranks. They compare as equal or not."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest


def sign_of(states: tuple[Any, ...]) -> tuple[object, ...]:
    """What tells states of `dice` apart, and is the same in every process. The hash of None is not."""
    (_, numbers, spare), _, keys, *rest = states
    return hash(numbers), spare, zlib.crc32(keys), *rest


def set_dice(states: tuple[Any, ...]) -> None:
    of_python, kind, keys, *rest = states
    random.setstate(of_python)
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))


def changed(before: dict[str, Any]) -> bool:
    """Whether something was drawn from torch's generators since that state."""
    one, other = ({"torch": each["torch"], **each["accelerator"]} for each in (before, capture()))
    return one.keys() != other.keys() or not all(torch.equal(one[name], other[name]) for name in one)


@contextmanager
def untouched() -> Iterator[None]:
    """What is drawn inside does not change the states."""
    state = capture()
    try:
        yield
    finally:
        restore(state)
