"""DeepSpeed in float64, which tells what is wrong from what is rounded. Only for tests: it has no such setting."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from strategies.accelerator import best_device
from strategies.sharding.deepspeed_engine import package
from tests.support.trained_on import ON_GPUS


@contextmanager
def doubled(policy: Any = "deepspeed") -> Iterator[None]:
    """Engines made herein keep, reduce and step in float64, if this policy has some."""
    if "deepspeed" not in str(policy):
        yield
        return
    package(torch.device(best_device() if ON_GPUS else "cpu"))
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses

    with ExitStack() as stack:
        for where, name, value in (
            (ZeROOptimizer, "_configure_master_weights", lambda *_, **__: torch.float64),
            (DeepSpeedEngine, "get_data_types", lambda _: (torch.float64, torch.float64)),
            (DeepSpeedEngine, "communication_data_type", torch.float64),
            (DeepSpeedEngine, "zero_reduce_scatter", lambda _: False),  # it knows no float64
            # On a GPU it refuses the type of a network that it should build. These are built before.
            (InsertPostInitMethodToModuleSubClasses, "_set_dtype", lambda self, *_: setattr(self, "dtype", torch.half)),
            (gc, "collect", lambda *_: 0),  # which takes half a second for each engine of stage 3
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        stack.enter_context(mock.patch("strategies.sharding.deepspeed_engine.DTYPE", torch.float64))
        yield
