"""What ranks import. A process imports it once, and every rank is a fork of that process: see worlds.py."""

from importlib.util import find_spec

import torch

import gan.app.painting.painter
import gan.app.planning.search
import gan.app.scoring.scoring
import gan.app.verifying.verification
import gan.evaluate
import gan.export
import gan.plan
import gan.runs
import gan.sample
import gan.verify  # noqa: F401
import samples.gallery  # noqa: F401
import tests.support.commands
import tests.support.crashes  # noqa: F401
from strategies.sharding.deepspeed_engine import package

if find_spec("deepspeed") is not None:
    package(torch.device("cpu"))
    import deepspeed.runtime.zero.utils  # noqa: F401
import torch._dynamo
import torch._inductor.compile_fx  # what DeepSpeed's first engine imports

from tests.support.counted import forget

forget()  # a rank that looks for garbage need not look through what all ranks have imported
