"""Batch norm over the samples of all ranks, or over groups of samples, on any backend."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gan import noise, ranks
from gan.files.errors import UserError
from gan.files.loading import not_compiled

torchs, torchs_instance_norm = F.batch_norm, F.instance_norm


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    group: int | None = None,
) -> Tensor:
    """F.batch_norm with the statistics of the global batch, or of each `group` of neighbouring samples in it.

    Written by hand, because torch's SyncBatchNorm refuses CPU tensors and cannot be differentiated twice. There is
    one all-reduce in forward, for all channels together, and one in backward. Ranks may hold different numbers of
    samples. In groups only the running statistics, which follow the mean of all groups, are communicated.
    """
    # torch refuses weights of another dtype, as +bf16 gives them.
    if weight is not None and running_mean is not None and weight.dtype != running_mean.dtype:
        weight, bias = weight.to(running_mean.dtype), None if bias is None else bias.to(running_mean.dtype)
    several = ranks.more_than_one() and not (len(input) == 1 and input.dim() > 2 and _beside(weight))
    if not training or not (several or group):
        return torchs(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if several and running_mean is not None:
        _refuse_between_phases()
    mean, variance, count = global_moments(input, group)
    if running_mean is not None and running_var is not None:
        follow(running_mean, running_var, mean, variance, count, momentum)
    if group is not None:
        mean, variance = mean.repeat_interleave(group, 0), variance.repeat_interleave(group, 0)
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    shift = -mean * scale
    if bias is not None:
        shift = shift + bias
    shape = [-1, input.shape[1]] + [1] * (input.dim() - 2)
    return input * scale.to(input.dtype).view(shape) + shift.to(input.dtype).view(shape)


@not_compiled
def _refuse_between_phases() -> None:
    place = noise.here()
    if _training and (place is None or place.total == 1):  # a hook draws as one device
        raise UserError(
            "a batch norm in training mode is called between phases, where a rank cannot know whether the others call "
            "it too, and whether on the same samples; call network.eval() before and network.train() after it, or, on "
            "samples that are the same on all ranks, call the network inside `with gan.ranks.alone():`"
        )


def _beside(weight: Tensor | None) -> bool:
    """Whether a tensor of one row is no batch, but has samples beside each other as channels, [1, B * C, H, W].

    So an adaptive instance norm calls this function, with computed weights. Its samples need no other rank. A module
    has computed weights too, in torch.func.functional_call.
    """
    place = noise.here()
    if place is not None and place.rows > 1:
        return True
    return not (isinstance(weight, nn.Parameter | None) or _called_by_a_module())


@not_compiled
def _called_by_a_module() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not batch_norm.__code__:
        frame = frame.f_back
    caller = None if frame is None or frame.f_back is None else frame.f_back.f_code
    return caller in (_BatchNorm.forward.__code__, SyncBatchNorm.forward.__code__)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.instance_norm whose running statistics, which StarGAN's generator has, follow the samples of all ranks."""
    settings = weight, bias, use_input_stats, momentum, eps
    if running_mean is None or running_var is None or not (use_input_stats and ranks.more_than_one()):
        return torchs_instance_norm(input, running_mean, running_var, *settings)
    return _following_all(input, running_mean, running_var, *settings)


@not_compiled
def _following_all(input: Tensor, running_mean: Tensor, running_var: Tensor, *settings: Any) -> Tensor:
    running = running_mean, running_var
    before = [each.clone() for each in running]
    found = torchs_instance_norm(input, running_mean, running_var, *settings)
    rows = before[0].new_full((1,), len(input), dtype=torch.float64)
    moved = [(now - old) * rows for now, old in zip(running, before, strict=True)]
    *parts, total = ranks.sum(torch.cat([*moved, rows])).split([*map(len, running), 1])
    for now, old, part in zip(running, before, parts, strict=True):
        now.copy_(old + part / total)
    return found


class SyncBatchNorm(_BatchNorm):
    """A batch norm that is synchronised whatever the Trainer says, or has the statistics of groups (`in_groups`)."""

    group: int | None = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        use_batch = self.training or self.running_mean is None
        kept = (self.running_mean, self.running_var) if self.track_running_stats or not self.training else (None, None)
        momentum = self.count() if self.training and self.track_running_stats else 0.0
        return batch_norm(input, *kept, self.weight, self.bias, use_batch, momentum, self.eps, self.group)

    def count(self) -> float:
        """Count a batch, and return its share in the running statistics."""
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)


_training = False  # whether phases are played, of which each rank plays the same ones


@contextmanager
def synchronised(training: bool = False) -> Iterator[None]:
    """Inside the `with`, torch's batch norms have the statistics of the global batch, and instance norms follow it.

    In a `training` batch norms are synchronised within its phases, and refuse to learn from samples between them.
    F.batch_norm is replaced, which they look up when they are called, and so is F.instance_norm. So no class is
    replaced: subclasses keep their forward, and modules that call F.batch_norm are synchronised too.
    """
    torch._dynamo.trace_rules.get_torch_obj_rule_map()  # looks up by name, once, which functions torch.compile keeps
    ours = mock.patch.multiple(F, batch_norm=batch_norm, instance_norm=instance_norm)
    told = mock.patch.dict(globals(), _training=training)
    with ours, told, mock.patch.object(nn.SyncBatchNorm, "forward", _BatchNorm.forward):  # its own refuses CPU tensors
        yield


def in_groups(network: nn.Module, size: int) -> nn.Module:
    """Give each batch norm inside the statistics of `size` neighbouring samples of the global batch, in place.

    That is what GPUs with so many samples each compute without synchronisation; here, at any number of ranks.
    """
    norms = {name: each for name, each in network.named_modules() if isinstance(each, _BatchNorm)}
    unlike = [name for name, each in norms.items() if type(each).__module__ not in (_BatchNorm.__module__, __name__)]
    if unlike or not norms:
        raise UserError(
            f"{type(network).__name__} has batch norms that are not torch's own ({', '.join(unlike) or 'no modules'}); "
            f"call nets.norm.batch_norm(..., group={size}) in them"
        )
    for norm in norms.values():
        norm.__class__ = SyncBatchNorm
        assert isinstance(norm, SyncBatchNorm)
        norm.group = size
    return network


@torch.no_grad()
def follow(
    running_mean: Tensor, running_var: Tensor, mean: Tensor, variance: Tensor, count: Tensor | int, momentum: float
) -> None:
    """Move the running statistics towards those of a batch, or of its groups, with `count` values in each channel."""
    if mean.dim() > 1:
        mean, variance = ranks.mean(torch.stack([mean, variance]).mean(1))
    unbiased = variance * (count / (count - 1))
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_(unbiased.to(running_var.dtype), momentum)


def global_moments(input: Tensor, group: int | None = None) -> tuple[Tensor, Tensor, Tensor | int]:
    """Mean and biased variance of each channel over all ranks, and the number of values, in one all-reduce.

    With `group` those of each group [groups, channels], and nothing is communicated.
    """
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    pixels = input.shape[2:].numel()
    if group is None:
        variance, mean = torch.var_mean(wide, [0, *range(2, wide.dim())], correction=0)
        return pooled_moments(mean, variance, len(input) * pixels)
    if len(input) % group or group * pixels < 2:
        raise UserError(
            f"batch norm in groups of {group} samples gets a tensor of shape {tuple(input.shape)}, and each group must "
            f"be on one rank and have several values; let each rank's micro-batch have a multiple of {group} samples"
        )
    variance, mean = torch.var_mean(wide.unflatten(0, (-1, group)), [1, *range(3, wide.dim() + 1)], correction=0)
    return mean, variance, group * pixels


def pooled_moments(mean: Tensor, variance: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor | int]:
    """The moments over all ranks, from those of this rank.

    They are combined in float64, where the difference of E[x²] and mean² loses nothing that float32 could have held.
    """
    if not ranks.more_than_one():
        if count < 2:
            raise UserError(
                "a batch norm gets one picture of one pixel, and so one value for each channel, which has no variance; "
                "take more samples a step (--batch-size 2) or larger ones (--size)"
            )
        return mean, variance, count
    kind, channels = mean.dtype, len(mean)
    mean, variance = mean.double(), variance.double()
    values = mean.new_full((1,), count)
    total = ranks.sum(torch.cat([mean * values, (variance + mean * mean) * values, values]))
    values = total[-1].detach()
    mean = total[:channels] / values
    variance = (total[channels:-1] / values - mean * mean).clamp_min(0)
    return mean.to(kind), variance.to(kind), values


class ActNorm(nn.Module):
    """A scale and a shift that learn, and begin as a batch norm of the first batch of all ranks (Kingma et al. 2018).

    `loc`, `scale` and `initialized` are the published names. The published code overwrites the weights in the first
    forward. Here buffers take what is added to them then, since a forward may write buffers under every policy.
    """

    initialized: Tensor
    to_loc: Tensor
    to_scale: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.scale = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))
        self.register_buffer("to_loc", torch.zeros(1, channels, 1, 1))
        self.register_buffer("to_scale", torch.zeros(1, channels, 1, 1))

    def published_state(self) -> dict[str, Tensor]:
        """See [Note: published names]."""
        added = {"loc": self.loc + self.to_loc, "scale": self.scale + self.to_scale}
        return {**added, "initialized": self.initialized}

    def take_published(self, state: dict[str, Tensor]) -> None:
        self.load_state_dict({**state, "to_loc": 0 * self.to_loc, "to_scale": 0 * self.to_scale})

    def forward(self, x: Tensor) -> Tensor:
        if self.training and (self.initialized.is_meta or not self.initialized):
            self.start(x)
        return (self.scale + self.to_scale) * (x + (self.loc + self.to_loc))

    @torch.no_grad()
    def start(self, x: Tensor) -> None:
        mean, variance, count = global_moments(x)
        deviation = (variance * (count / (count - 1))).sqrt()
        self.to_loc.copy_(-mean.view_as(self.loc) - self.loc)
        self.to_scale.copy_(1 / (deviation + 1e-6).view_as(self.scale) - self.scale)
        self.initialized.fill_(1)


def rows_together(module: nn.Module) -> int:
    """What divides a rank's rows, for the groups of batch norms inside."""
    return math.lcm(*(each.group for each in module.modules() if isinstance(each, SyncBatchNorm) and each.group))


def torchs_own(module: nn.Module) -> bool:
    """Whether a SyncBatchNorm of torch's trains in its own way: it communicates inside torch, and on GPUs only."""
    norms = [each for each in module.modules() if isinstance(each, nn.SyncBatchNorm)]
    return nn.SyncBatchNorm.forward is not _BatchNorm.forward and any(each.training for each in norms)


def unsynchronised(module: nn.Module) -> bool:
    """Whether a batch norm takes statistics of its own rank's samples alone, or an instance norm keeps such ones."""
    norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
    kinds = {type(each) for each in norms if each.training or each.running_mean is None}
    keeps = any(isinstance(each, _InstanceNorm) and each.track_running_stats for each in module.modules())
    itself = keeps or not all(issubclass(kind, SyncBatchNorm | nn.SyncBatchNorm) for kind in kinds)
    return F.batch_norm is torchs and itself
