"""On what tests of strategies train: on the CPU, or with TESTS_ON=gpu on this machine's accelerators (`make gpu`)."""

import os
from typing import Any

import torch

from strategies import TorchAccelerator
from strategies.accelerator import best_device

ON_GPUS = os.environ.get("TESTS_ON", "cpu") != "cpu"
BACKEND = os.environ.get("TESTS_BACKEND", "nccl") if ON_GPUS else "gloo"


def stand_apart(rank: int) -> None:
    """Let NCCL take this rank for one of another host: it refuses two ranks of one host on one GPU."""
    os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % torch.cuda.device_count())


class Shared(TorchAccelerator):
    """The ranks share the accelerators, if there are fewer."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device(best_device(), number % torch.accelerator.device_count()) for number in range(devices)]


def accelerator() -> Any:
    """What a test's Trainer takes as `accelerator`."""
    return Shared() if ON_GPUS else "cpu"


def description() -> str:
    """In a few words, for a table."""
    if not ON_GPUS:
        return "the CPU"
    return f"{torch.accelerator.device_count()} x {torch.get_device_module().get_device_name()}"
