"""What ranks and commands import. A process imports it once, and each of them is a fork of that: see worlds.py."""

import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pkgutil import walk_packages
from unittest import mock

import torch

with mock.patch.object(torch.cuda, "is_available", return_value=False):  # to ask would keep forks from using a GPU
    import torch._dynamo
    import torch._inductor.compile_fx  # what DeepSpeed's first engine imports

import datasets
import gan
import nets
import samples.gallery  # noqa: F401
import strategies
import tests.support.crashes  # noqa: F401
from gan.app.run import options
from strategies.sharding.deepspeed_engine import package
from tests.support import commands
from tests.support.counted import forget

# A suite that runs in the background ignores these, and so would what is forked; tests send them.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A thread of gloo that has news would interrupt its rank at once, and be interrupted: half of the time of ranks whose
# networks are small. A process inherits the way it is scheduled.
with suppress(AttributeError, OSError):  # where there is no such way
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

for ours in (gan, nets, datasets, strategies):
    for module in walk_packages(ours.__path__, f"{ours.__name__}."):
        import_module(module.name)
if find_spec("omegaconf") is not None:
    import omegaconf  # noqa: F401 - Lightning asks for it when it saves
if find_spec("deepspeed") is not None:
    sys.modules["mlflow"] = None  # what tunes DeepSpeed would import it, which takes as long as torch
    package(torch.device("cpu"))
    import deepspeed.module_inject
    import deepspeed.runtime.zero.utils  # noqa: F401

    del sys.modules["mlflow"]

commands.make_parsers_once()
commands.remember_settings()
commands.draw_faces_once()
options.parse(["r3gan-faces"])  # imports what reads a command line
commands.remember_plugins()
commands.log_in_place()
commands.seed_the_cpu()
forget()  # a rank that looks for garbage need not look through what all ranks have imported
