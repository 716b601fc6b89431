"""The states of one rank's random generators, in types that torch.load(weights_only=True) accepts."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The states of torch (for the CPU and for this rank's GPU), NumPy and Python."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "python": random.getstate(),
    }


ALIKE = "numpy", "python"  # those generators that are in the same state on all ranks


def restore(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    restore_alike(state)


def restore_alike(state: dict[str, Any]) -> None:
    """Restore the generators of NumPy and Python alone."""
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


def changed(before: dict[str, Any], *others: str) -> bool:
    """Whether something was drawn from torch's generators, or from these others, since that state."""
    now = capture()
    return not all(equal(before[name], now[name]) for name in ("torch", "cuda", *others))


def equal(one: Any, other: Any) -> bool:
    """Whether two states are the same: nothing was drawn between them."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return all(map(equal, one, other))
    return one == other


@contextmanager
def untouched() -> Iterator[None]:
    """What is drawn inside does not change the states."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


def reseed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
