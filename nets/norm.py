"""Batch norm over the samples of all ranks, on any backend."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from gan import ranks


class SyncBatchNorm(_BatchNorm):
    """Batch norm whose statistics are those of the global batch: what one device would compute.

    Written by hand, because torch's SyncBatchNorm refuses CPU tensors and cannot be differentiated twice. There is
    one all-reduce in forward, for all channels together, and one in backward. Ranks may hold different numbers of
    samples.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        use_batch = self.training or self.running_mean is None
        tensors = [each for each in (self.weight, self.running_mean) if each is not None]
        mixed = len({each.dtype for each in tensors}) > 1  # torch's own batch norm refuses that
        if not use_batch or not (ranks.more_than_one() or mixed):
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
        """Move the running statistics towards those of a batch with `count` values in each channel."""
        self.num_batches_tracked += 1
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def global_moments(input: Tensor) -> tuple[Tensor, Tensor, Tensor | int]:
    """Mean and biased variance of each channel over all ranks, and the number of values, in one all-reduce."""
    dims = [0, *range(2, input.dim())]
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    variance, mean = torch.var_mean(wide, dims, correction=0)
    return pooled_moments(mean, variance, input.numel() // input.shape[1])


def pooled_moments(mean: Tensor, variance: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor | int]:
    """The moments over all ranks, from those of this rank.

    They are combined in float64, where the difference of E[x²] and mean² loses nothing that float32 could have held.
    """
    if not ranks.more_than_one():
        return mean, variance, count
    kind, channels = mean.dtype, len(mean)
    mean, variance = mean.double(), variance.double()
    values = mean.new_full((1,), count)
    total = ranks.sum(torch.cat([mean * values, (variance + mean * mean) * values, values]))
    values = total[-1].detach()
    mean = total[:channels] / values
    variance = (total[channels:-1] / values - mean * mean).clamp_min(0)
    return mean.to(kind), variance.to(kind), values


def wide_sum(values: Tensor) -> Tensor:
    """The sum over ranks, in float64; the values themselves where there is one rank."""
    return ranks.sum(values.double()) if ranks.more_than_one() else values


def unsynchronised(module: nn.Module) -> list[str]:
    """The names of batch norms that see only the samples of their own rank."""
    return [
        name
        for name, child in module.named_modules()
        if isinstance(child, _BatchNorm)
        and type(child).__module__ == "torch.nn.modules.batchnorm"
        and type(child) is not nn.SyncBatchNorm
    ]


def convert_sync_batchnorm(module: nn.Module) -> None:
    """Synchronise every batch norm inside, in place: objects, weights and state-dict keys stay the same."""
    for child in module.modules():
        if isinstance(child, _BatchNorm):
            child.__class__ = SyncBatchNorm
