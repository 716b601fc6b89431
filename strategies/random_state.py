"""The random states of one rank, in types that a weights-only load accepts."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The states of torch (the CPU's, and that of this rank's GPU), NumPy and Python."""
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "python": random.getstate(),
    }


def restore(state: dict[str, Any]) -> None:
    """Go on drawing where `capture` left off."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
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
