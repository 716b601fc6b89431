"""Noise, batch norm, a scale and shift for each pixel, leaky ReLU and a convolution, as one operation of autograd.

[Note: what is kept for backward]
One after the other, these operations keep some ten tensors of the picture's size for each layer. All but the
convolution are cheap. So we keep the layer's input, the tables of scale and shift, and the weights, and backward
computes the rest again. A batch norm's backward needs sums for each channel only, and the tables give them for free.

It is written by hand, because torch's own operations cannot do it. A checkpoint would run the all-reduce twice. Every
tensor in between is memory to allocate, which on a CPU costs more than the arithmetic.

With `keep`, the normalised input and the convolution's input are kept too: more memory, less to compute.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gan import ranks
from gan.files.errors import UserError
from gan.files.loading import not_compiled
from nets.norm import SyncBatchNorm, follow, pooled_moments


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a convolution computes: autocast's where autocast is on."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


@dataclass(frozen=True)
class Settings:
    """What the operation needs besides tensors that learn. `pixels` is as in Neighbourhoods."""

    norm: SyncBatchNorm
    training: bool
    pixels: Tensor | None
    slope: float
    padding: int
    keep: bool


@not_compiled  # it is one operation already, with an all-reduce inside
def norm_conv(
    settings: Settings,
    x: Tensor,
    grain: Tensor,
    noise_scale: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """conv(act(norm(x + grain * noise_scale) * (1 + scale) + shift)).

    `grain` [B,1,H,W] is the noise. `scale` and `shift` are maps [B,C,H,W], or tables [B,C,kinds]; then
    `settings.pixels` gives each pixel's row of the table.
    """
    if settings.norm.group is not None:
        raise UserError("SEAN's batch norms are over all samples; leave nets.norm.in_groups out for its generator")
    return _NormConv.apply(settings, x, grain, noise_scale, scale, shift, weight, bias)


class _NormConv(torch.autograd.Function):
    """See [Note: what is kept for backward]."""

    @staticmethod
    def forward(ctx, settings: Settings, *tensors: Any) -> Tensor:  # noqa: ANN001
        x, grain, noise_scale, scale, shift, weight, bias = tensors
        dtype = compute_dtype(weight)
        y = _add_noise(x, grain, noise_scale)
        mean, variance, count = _center(settings, y)
        rstd = torch.rsqrt(variance + settings.norm.eps)
        inner = _activate(settings, y, scale, shift, rstd, torch.empty_like(y) if settings.keep else y).to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            out = F.conv2d(inner, weight.to(dtype), bias if bias is None else bias.to(dtype), padding=settings.padding)
        ctx.settings, ctx.count, ctx.world = settings, count, ranks.here()  # see [Note: the world of a forward]
        ctx.save_for_backward(*tensors, mean, rstd, *((y, inner) if settings.keep else ()))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        settings = ctx.settings
        # Read this once: under activation checkpointing, each access computes the tensors again.
        saved = ctx.saved_tensors
        *tensors, mean, rstd = saved[:9]
        wanted = ctx.needs_input_grad[1:]
        x, grain, noise_scale, scale, shift, weight, bias = tensors
        dtype = gradient.dtype

        # Compute again what was not kept.
        if settings.keep:
            y, inner = saved[9:]
            spare = torch.empty_like(y)
        else:
            y = _add_noise(x, grain, noise_scale).sub_(_as_channels(mean))
            spare = torch.empty_like(y)
            inner = _activate(settings, y, scale, shift, rstd, spare).to(dtype)

        # Backward through the convolution and the activation.
        geometry = [1, 1], [settings.padding] * 2, [1, 1], False, [0, 0], 1
        sizes, asked = None if bias is None else [len(bias)], [True, wanted[5], bias is not None and wanted[6]]
        gradient, dweight, dbias = torch.ops.aten.convolution_backward(
            gradient, inner, weight.to(dtype), sizes, *geometry, asked
        )
        if settings.slope != 1:
            torch.ops.aten.leaky_relu_backward.grad_input(gradient, inner, settings.slope, True, grad_input=gradient)
        gradient = gradient.to(y.dtype)
        del inner

        # The gradients of scale and shift, which also give the batch norm's sums.
        torch.mul(gradient, y, out=spare)
        if settings.pixels is None:
            per_channel = rstd.view(-1, 1, 1)
            dscale, dshift = spare * per_channel, gradient
            factor = (1 + scale) * per_channel
            torch.mul(factor, gradient, out=spare)
            sums = _channel_sums(spare), _channel_dots(spare, y)
        else:
            dshift, dscale = _sum_pixels(gradient, shift, settings.pixels), _sum_pixels(spare, scale, settings.pixels)
            factor = (1 + scale) * rstd.view(-1, 1)
            sums = (factor * dshift).sum((0, 2)), (factor * dscale).sum((0, 2))
            dscale = dscale * rstd.view(-1, 1)
            _look_up(factor, settings.pixels, out=spare).mul_(gradient)
        del gradient

        # Backward through the batch norm: `spare` is the gradient as if its statistics were constants.
        if settings.training:
            total = torch.cat(sums)
            with ranks.at(ctx.world):
                total = ranks.sum(total.double()) if ranks.more_than_one() else total
            first, second = (total / ctx.count).to(y.dtype).chunk(2)
            spare.addcmul_(y, _as_channels(second * rstd.square()), value=-1).sub_(_as_channels(first))
        dnoise = _channel_dots(spare, grain).view_as(noise_scale) if wanted[2] else None
        gradients = zip(tensors, (spare, None, dnoise, dscale, dshift, dweight, dbias), strict=True)
        return None, *(each if each is None else each.to(tensor.dtype) for tensor, each in gradients)


def _add_noise(x: Tensor, grain: Tensor, noise_scale: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, noise_scale.dtype)
    return torch.addcmul(x.to(wide), grain.to(wide), noise_scale)


def _center(settings: Settings, y: Tensor) -> tuple[Tensor, Tensor, Tensor | int]:
    """Subtract the mean in place. Gives mean, variance and number of values, of all ranks together."""
    count, norm = y.numel() // y.shape[1], settings.norm
    assert norm.running_mean is not None and norm.running_var is not None
    if not settings.training:
        mean = norm.running_mean.to(y.dtype)
        y.sub_(_as_channels(mean))
        return mean, norm.running_var.to(y.dtype), count
    local = _channel_sums(y) / count
    y.sub_(_as_channels(local))
    mean, variance, count = pooled_moments(local, _channel_dots(y, y) / count, count)
    if ranks.more_than_one():
        y.sub_(_as_channels(mean - local))
    follow(norm.running_mean, norm.running_var, mean, variance, count, norm.count())
    return mean, variance, count


def _activate(settings: Settings, y: Tensor, scale: Tensor, shift: Tensor, rstd: Tensor, spare: Tensor) -> Tensor:
    """act(y * rstd * (1 + scale) + shift), for a centred y; `spare` is overwritten and may be y itself."""
    if settings.pixels is None:
        out = (scale + 1).mul_(rstd.view(-1, 1, 1)).mul_(y).add_(shift)
    else:
        out = _look_up((1 + scale) * rstd.view(-1, 1), settings.pixels).view_as(y).mul_(y)
        out.add_(_look_up(shift, settings.pixels, out=spare))
    return F.leaky_relu_(out, settings.slope) if settings.slope != 1 else out


def _look_up(table: Tensor, pixels: Tensor, out: Tensor | None = None) -> Tensor:
    """Each pixel's row of a table [B,C,kinds]: [B,C,H*W], or written to `out` [B,C,H,W]."""
    index = pixels.expand(-1, table.shape[1], -1)
    if out is None:
        return table.gather(2, index)
    torch.gather(table.to(out.dtype), 2, index, out=out.flatten(2))
    return out


def _sum_pixels(pictures: Tensor, table: Tensor, pixels: Tensor) -> Tensor:
    """For each row of a table, the sum over its pixels: the transpose of `_look_up`."""
    index = pixels.expand(-1, table.shape[1], -1)
    return torch.zeros_like(table, dtype=pictures.dtype).scatter_add_(2, index, pictures.flatten(2))


def _channel_sums(x: Tensor) -> Tensor:
    return x.sum((2, 3)).sum(0)


def _channel_dots(x: Tensor, y: Tensor) -> Tensor:
    """The sum of x * y for each channel; y has as many channels as x, or one."""
    if x.device.type != "cpu":
        return (x * y).sum((0, 2, 3))
    # A dot product for each picture and channel: torch's sum over several dimensions is ten times slower here.
    if y.shape[1] == 1:
        return (x.flatten(2) @ y.flatten(2).to(x.dtype).mT).sum((0, 2))
    rows, columns = x.flatten(2).flatten(0, 1).unsqueeze(1), y.flatten(2).flatten(0, 1).unsqueeze(2)
    return (rows @ columns).view(x.shape[:2]).sum(0)


def _as_channels(channels: Tensor) -> Tensor:
    return channels.view(-1, 1, 1)


def mask_conv(*tensors: Tensor) -> Tensor:
    """conv(relu(conv(planes))), of planes, and of weight and bias of both convolutions.

    What the first one gives is among the largest tensors of a layer, but cheap: its input is a one-hot mask. So
    backward computes it again. torch's checkpoint computes no more than that: it stops before the second convolution.
    """
    if not torch.is_grad_enabled():
        return _mask_conv(*tensors)
    return checkpoint(_mask_conv, *tensors, use_reentrant=False, preserve_rng_state=False)


def _mask_conv(*tensors: Tensor) -> Tensor:
    dtype = compute_dtype(tensors[1])
    planes, first, first_bias, second, bias = (tensor.to(dtype) for tensor in tensors)
    hidden = F.relu(F.conv2d(planes, first, first_bias, padding=1), inplace=True)
    return F.conv2d(hidden, second, bias, padding=1)
