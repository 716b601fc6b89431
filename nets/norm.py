"""Batch norm over the samples of all ranks, on any backend."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose statistics are those of the global batch: what one device would compute.

    By hand, because torch's SyncBatchNorm refuses CPU tensors and cannot be differentiated twice. One
    all-reduce in forward (sums of all channels together), and autograd's one in backward. Ranks may hold
    different numbers of samples.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise; torch's own kernel does it where there is no one to share with."""
        use_batch = self.training or self.running_mean is None
        if not use_batch or not shared():
            return super().forward(input)
        self._check_input_dim(input)
        mean, variance, count = global_moments(input)
        if self.training and self.track_running_stats:
            self.track(mean, variance, count)
        scale = torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shift = -mean * scale
        if self.bias is not None:
            shift = shift + self.bias
        shape = [1, -1] + [1] * (input.dim() - 2)
        return input * scale.to(input.dtype).view(shape) + shift.to(input.dtype).view(shape)

    @torch.no_grad()
    def track(self, mean: Tensor, variance: Tensor, count: Tensor | int) -> None:
        """Move the running statistics towards those of a batch of so many values a channel."""
        self.num_batches_tracked += 1
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


_add: ContextVar[Callable[[Tensor], Tensor] | None] = ContextVar("add", default=None)


@contextmanager
def added_up_by(add: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let sums over ranks be made by this function in this thread, where ranks are threads and not processes."""
    token = _add.set(add)
    try:
        yield
    finally:
        _add.reset(token)


def shared() -> bool:
    """Whether there are other ranks to share statistics with."""
    return _add.get() is not None or (dist.is_initialized() and dist.get_world_size() > 1)


def global_moments(input: Tensor) -> tuple[Tensor, Tensor, Tensor | int]:
    """Mean and biased variance of each channel over all ranks, and the number of values, in one all-reduce."""
    dims = [0, *range(2, input.dim())]
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    variance, mean = torch.var_mean(wide, dims, correction=0)
    return pooled_moments(mean, variance, input.numel() // input.shape[1])


def pooled_moments(mean: Tensor, variance: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor | int]:
    """The moments over all ranks from those of this one.

    Local moments are exact by themselves; they are combined in float64, where the difference of E[x²] and
    mean² loses nothing that float32 could have held.
    """
    if not shared():
        return mean, variance, count
    kind, channels = mean.dtype, len(mean)
    mean, variance = mean.double(), variance.double()
    values = mean.new_full((1,), count)
    total = _sum(torch.cat([mean * values, (variance + mean * mean) * values, values]))
    values = total[-1].detach()
    mean = total[:channels] / values
    variance = (total[channels:-1] / values - mean * mean).clamp_min(0)
    return mean.to(kind), variance.to(kind), values


def added_up(values: Tensor) -> Tensor:
    """The sum over ranks, in the values' own type; its gradients are sums, too, of every order."""
    return _Sum.apply(values)


def summed(values: Tensor) -> Tensor:
    """The sum over ranks, in float64; just the values where there is no one to share with."""
    return _sum(values.double()) if shared() else values


@torch.compiler.disable  # ranks compile by themselves, and must meet in one order
def _sum(values: Tensor) -> Tensor:
    return _Sum.apply(values)


class _Sum(torch.autograd.Function):
    """The sum over ranks; its gradient is the sum of gradients, and so on for every order."""

    @staticmethod
    def forward(ctx, value: Tensor) -> Tensor:  # noqa: ANN001
        heard = _heard.get()
        if heard is not None:
            return next(heard).clone()
        if (add := _add.get()) is not None:
            return add(value.detach())
        total = value.detach().clone()
        dist.all_reduce(total)
        hearing = _hearing.get()
        if hearing is not None:
            hearing.append(total.clone())  # a copy, because the total itself becomes part of a graph
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # noqa: ANN001
        return _Sum.apply(gradient.contiguous())


# A forward that is computed again for its backward asks the other ranks nothing: it remembers what they said.
_hearing: ContextVar[list[Tensor] | None] = ContextVar("hearing", default=None)
_heard: ContextVar[Iterator[Tensor] | None] = ContextVar("heard", default=None)


@contextmanager
def hearing(sums: list[Tensor]) -> Iterator[None]:
    """Note every sum over ranks of a forward, in order."""
    token = _hearing.set(sums)
    try:
        yield
    finally:
        _hearing.reset(token)


@contextmanager
def heard(sums: list[Tensor]) -> Iterator[None]:
    """Take the sums over ranks of a forward from those that it noted, in the same order."""
    token = _heard.set(iter(sums))
    try:
        yield
    finally:
        _heard.reset(token)


def convert_sync_batchnorm(module: nn.Module) -> None:
    """Make every batch norm inside synchronise, in place: the same objects, weights and state-dict keys."""
    for child in module.modules():
        if isinstance(child, _BatchNorm):
            child.__class__ = SyncBatchNorm
