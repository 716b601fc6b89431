"""The accelerator of this machine, for Lightning: whatever kind torch finds, also one that Lightning does not know."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from gan.files.errors import UserError

GPUS = ("cuda", "xpu", "mps")


class TorchAccelerator(Accelerator):
    """What `torch.accelerator` finds, such as xpu or tpu: for a `Trainer(accelerator=TorchAccelerator(), ...)`.

    Also for Apple's mps: with its own class for that, Lightning refuses every strategy that can have several ranks.
    """

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: int | str | list[int]) -> list[int]:
        """The numbers of the devices. `devices` has them, or is how many; -1 means all."""
        numbers, count = devices, torch.accelerator.device_count()
        if isinstance(numbers, str):
            numbers = [int(number) for number in numbers.split(",")] if "," in numbers else int(numbers)
        if isinstance(numbers, int):
            numbers = list(range(count if numbers == -1 else numbers))
        if max(numbers) >= count:
            raise UserError(
                f"devices={devices}: this machine has {say_devices(count, best_device())}; type devices={count}"
            )
        return numbers

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device(best_device(), number) for number in devices]

    @staticmethod
    def auto_device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        return best_device() != "cpu"

    @staticmethod
    def name() -> str:
        return best_device()


def name_of(device: str | torch.device) -> str:
    """What a device calls itself; its type if it has no name."""
    name = getattr(torch.get_device_module(torch.device(device)), "get_device_name", None)
    return str(device) if name is None else name(device)


def best_device() -> str:
    """The type of the devices that this machine computes on best, such as cuda; cpu if it has no accelerator."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def say_devices(count: int, of: str) -> str:
    """So many devices of a type, in words: 2 GPUs."""
    return f"{count} {device_noun(of)}{'' if count == 1 else 's'}"


def device_noun(of: str) -> str:
    return "GPU" if of in ("gpu", *GPUS) else f"{of} device"


def correct_precision(precision: Precision, device: torch.device) -> None:
    """Correct what Lightning takes this device for: every mixed precision for cuda, every CUDA build for a GPU's."""
    if isinstance(precision, MixedPrecision):
        precision.device = device.type
    if device.type == "cpu":
        # Lightning sets this variable when it is imported. In a CUDA build Adam then looks for a driver in every step.
        os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)


def pins(device: torch.device) -> bool:
    """Whether copies to this device are faster from pinned memory, and torch can pin it."""
    return device.type in ("cuda", "xpu")


@contextmanager
def same_parameters(device: torch.device) -> Iterator[None]:
    """Inside the `with`, a module that is moved to this device, or back, keeps its parameters.

    For a device that is not torch's own, `Module.to` makes new ones, and weights that are tied would come apart.
    """
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(before or device.type not in ("cpu", *GPUS))
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
