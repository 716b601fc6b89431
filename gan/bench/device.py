"""What benchmarks measure with: a training that stops for measurements, and a device's time, rate, memory and name."""

import time
from collections.abc import Callable, Generator
from inspect import GEN_CREATED, getgeneratorstate
from typing import Any

import torch
import torch.distributed as dist
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

# What is done before the first step, and then after each one for which it waits: it gets the step's batch.
Measuring = Generator[None, Any, Any]


def train(game: LightningModule, data: Any, strategy: Any, measuring: Measuring | None = None, **options: Any) -> Any:
    """Train, with nothing beside the training itself: `max_steps`, or one epoch. Gives what is measured."""
    measured: list[Any] = [] if measuring is None else [Measured(measuring)]
    options |= {} if "max_steps" in options else {"max_epochs": 1}
    Trainer(
        strategy=strategy,
        callbacks=measured,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        **options,
    ).fit(game, data)
    return measured[0].found if measured else None


def wait(steps: int) -> Measuring:
    """Wait for the end of so many steps; gives the last batch."""
    batch = None
    for _ in range(steps):
        batch = yield
    return batch


class Measured(Callback):
    def __init__(self, measuring: Measuring) -> None:
        self.measuring, self.found = measuring, None

    def on_train_batch_start(self, trainer: Trainer, game: LightningModule, batch: Any, number: int) -> None:
        if getgeneratorstate(self.measuring) == GEN_CREATED:
            next(self.measuring)

    def on_train_batch_end(self, trainer: Trainer, game: LightningModule, outputs: Any, batch: Any, _: int) -> None:
        try:
            self.measuring.send(batch)
        except StopIteration as ended:
            self.found = ended.value


class Counter(TorchDispatchMode):
    """Adds up what `count` says of each of torch's operations inside the `with`."""

    def __init__(self, count: Callable[..., int]) -> None:
        super().__init__()
        self.count, self.total = count, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.total += self.count(function, args, kwargs or {}, result)
        return result


def multiplications(function: Any, args: tuple, kwargs: dict, result: Any) -> int:
    """As torch's FlopCounterMode, which has hooks of modules, and these fail in a gradient of a gradient."""
    counted = flop_registry.get(function._overloadpacket)
    return 0 if counted is None else counted(*args, **kwargs, out_val=result)


def payload(function: Any, args: tuple, kwargs: dict, result: Any) -> int:
    """The bytes that a collective gets, of input and output the larger, also of one that is started in C++.

    So a tensor of N bytes counts N in an all-reduce, in a gather and in a scatter.
    """
    space, _, rest = str(function).partition(".")
    if "c10d" not in space or "barrier" in rest or "wait_tensor" in rest:
        return 0
    trees = [pytree.tree_leaves(tree) for tree in (*args, result)]
    return max(sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor)) for leaves in trees)


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


def now_on_all() -> float:
    """The time, after all ranks have arrived here."""
    if dist.is_initialized():
        dist.barrier()
    return time.perf_counter()


def place(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
