"""Networks compute on the CPU as on a GPU: nets/fused.py by Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from nets.blocks import OURS, TRITON


@contextmanager
def as_on_a_gpu(block: int) -> Iterator[None]:
    """The interpreter takes its time for each block, and for each number of a block."""
    pytest.importorskip("triton", reason="comes with torch on Linux")
    from triton.runtime.interpreter import InterpretedFunction

    from nets import fused

    kernels = {name: InterpretedFunction(getattr(fused, name).fn) for name in ("_filter", "_activate")}
    with mock.patch.multiple(fused, BLOCK=block, **kernels), mock.patch.dict(TRITON):
        OURS.add("cpu")
        try:
            yield
        finally:
            OURS.remove("cpu")
