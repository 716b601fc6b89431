"""DeepSpeed itself, imported for the kind of device that is trained on."""

import logging
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gan.errors import UserError


def package(device: torch.device) -> Any:
    """Import DeepSpeed for this kind of device."""
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # it would print a lot, on every rank
    # DeepSpeed reads this variable when it is imported.
    with mock.patch.dict(os.environ, DS_ACCELERATOR=os.environ.get("DS_ACCELERATOR", device.type)):
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops import __compatible_ops__

        # An operation for inference on CPUs. It would be compiled first, and it is not used here.
        __compatible_ops__["deepspeed_shm_comm"] = False
        _forget_old_groups(deepspeed)
        known = torch.device(get_accelerator().device_name()).type
    if known != device.type:
        raise UserError(
            f"DeepSpeed computes on {known} in this process and the run on {device.type}; type "
            f"DS_ACCELERATOR={device.type} in front of the command"
        )
    return deepspeed


def _forget_old_groups(deepspeed: Any) -> None:
    """Reset DeepSpeed if torch has new process groups, because DeepSpeed keeps the first ones that it saw."""
    if getattr(deepspeed, "world_of_phases", dist.group.WORLD) is not dist.group.WORLD:
        deepspeed.comm.comm.cdb = None
        deepspeed.utils.groups._release_process_group_references()
    deepspeed.world_of_phases = dist.group.WORLD


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
