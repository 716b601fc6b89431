"""What benchmarks share: what a device is asked for (time, rate, memory, name, multiplications) and a Trainer told."""

import time
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gan.files.system import resource

ONLY_TRAINING: dict[str, Any] = {  # what a Trainer is told that only trains
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    **dict.fromkeys(("limit_val_batches", "num_sanity_val_steps"), 0),
}


class Multiplications(TorchDispatchMode):
    """Counts as torch's FlopCounterMode does. That one has hooks of modules, which fail in a gradient of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        counted = flop_registry.get(function._overloadpacket)
        if counted is not None:
            self.count += counted(*args, **(kwargs or {}), out_val=result)
        return result


def convolution_rate(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Multiplications and additions a second in a convolution whose size suits the machine; the best of ten."""
    x = torch.randn(4, 512, 64, 64, device=device, dtype=dtype)
    weight = torch.randn(256, 512, 3, 3, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(10):
        began = now(device)
        out = F.conv2d(x, weight, padding=1)
        best = min(best, now(device) - began)
    return 2 * out.numel() * weight[0].numel() / best


def now(device: torch.device) -> float:
    """The time, after the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def place(device: torch.device) -> str:
    """The device in words."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


def peak_memory(device: torch.device) -> int:
    """The most memory that tensors had on an accelerator; on a CPU the most that the process had."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
