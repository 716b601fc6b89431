"""The random states of one rank, in types that a weights-only load accepts."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The states of torch (CPU and this process's GPUs), NumPy and Python."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (kind, keys.tolist(), *rest),
        "python": random.getstate(),
    }


def restore(state: dict[str, Any]) -> None:
    """Go on drawing where `capture` left off."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(tuple(state["numpy"]))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))


@contextmanager
def untouched() -> Iterator[None]:
    """Whatever is drawn inside, the states are afterwards as before."""
    state = capture()
    try:
        yield
    finally:
        restore(state)


def reseed(seed: int) -> None:
    """Start all of them anew."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
