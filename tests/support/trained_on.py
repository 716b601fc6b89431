"""On what tests of strategies train: on the CPU, or with TESTS_ON=gpu on this machine's accelerators (`make gpu`)."""

import os
from typing import Any

import torch
from lightning.pytorch.accelerators import Accelerator

ON_GPUS = os.environ.get("TESTS_ON", "cpu") != "cpu"


class Shared(Accelerator):
    """The ranks share the accelerators, if there are fewer: by gloo, for NCCL refuses two ranks on one GPU."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device.index)

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        kind, there = torch.accelerator.current_accelerator().type, torch.accelerator.device_count()
        return [torch.device(kind, number % there) for number in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        return torch.accelerator.is_available()

    @staticmethod
    def name() -> str:
        return "shared"

    def get_device_stats(self, device: torch.device) -> dict[str, Any]:
        return {}


def accelerator() -> Any:
    """What a test's Trainer takes as `accelerator`."""
    return Shared() if ON_GPUS else "cpu"


def description() -> str:
    """In a few words, for a table."""
    if not ON_GPUS:
        return "the CPU"
    return f"{torch.accelerator.device_count()} x {torch.get_device_module().get_device_name()}"
