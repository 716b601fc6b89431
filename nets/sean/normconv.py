"""Noise, batch norm, a scale and shift for every pixel, leaky ReLU, convolution: as one step of autograd.

[Note: what is kept for backward]
Written one after another, these operations keep some ten tensors of the picture's size a layer. All but the
convolution are cheap, so backward makes them anew from the layer's input: that, the tables of scale and shift and
the weights are all that is kept, and a batch norm's backward needs sums a channel only, which the tables give for
free. By hand, because no composition of torch's operations gets there: a checkpoint would convolve twice and repeat
the collective, and every intermediate is memory to allocate, which on a CPU costs more than the arithmetic.
With `keep` the normalised input and the convolution's stay as well: more memory, less to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from gan import ranks
from nets.norm import SyncBatchNorm, global_moments, pooled_moments, wide_sum


@dataclass(frozen=True)
class Step:
    """What the step needs besides tensors that learn. `pixels` is as in Neighbourhoods."""

    norm: SyncBatchNorm
    training: bool
    pixels: Tensor | None
    slope: float
    padding: int
    keep: bool


@torch.compiler.disable  # one step of its own already, with collectives in it
def norm_conv(
    step: Step,
    x: Tensor,
    grain: Tensor,
    noise_scale: Tensor,
    scale: Tensor,
    shift: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """conv(act(norm(x + grain * noise_scale) * (1 + scale) + shift)).

    scale and shift are maps [B,C,H,W], or tables [B,C,kinds] in which `step.pixels` says where each pixel looks.
    """
    return _NormConv.apply(step, x, grain, noise_scale, scale, shift, weight, bias)


def plain_norm_conv(
    step: Step, tensors: Sequence[Tensor | None], constants: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The same, operation by operation; what is differentiated when a gradient's own gradient is asked for.

    `tensors` are those of norm_conv; `constants` are mean and 1 / deviation where they are not the batch's.
    """
    x, grain, noise_scale, scale, shift, weight, bias = tensors
    y = x + grain * noise_scale
    if constants is None:
        mean, variance, _ = global_moments(y)
        constants = mean, torch.rsqrt(variance + step.norm.eps)
    normal = (y - _wide(constants[0])) * _wide(constants[1])
    if step.pixels is not None:
        scale, shift = (_look_up(table, step.pixels).view_as(y) for table in (scale, shift))
    out = F.leaky_relu(normal * (1 + scale) + shift, step.slope)
    return F.conv2d(out.to(weight.dtype), weight, bias, padding=step.padding)


class _NormConv(torch.autograd.Function):
    """See [Note: what is kept for backward]."""

    @staticmethod
    def forward(ctx, step: Step, *tensors: Tensor | None) -> Tensor:  # noqa: ANN001
        x, grain, noise_scale, scale, shift, weight, bias = tensors
        dtype = compute_dtype(weight)
        y = _noisy(x, grain, noise_scale)
        mean, variance, count = _center(step, y)
        rstd = torch.rsqrt(variance + step.norm.eps)
        inner = _activate(step, y, scale, shift, rstd, torch.empty_like(y) if step.keep else y).to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            out = F.conv2d(inner, weight.to(dtype), _to(bias, dtype), padding=step.padding)
        ctx.step, ctx.count = step, count
        ctx.save_for_backward(*tensors, mean, rstd, *((y, inner) if step.keep else ()))
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        step = ctx.step
        # Once: under activation checkpointing each look makes them anew.
        saved = ctx.saved_tensors
        *tensors, mean, rstd = saved[:9]
        wanted = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            constants = None if step.training else (mean, rstd)
            return None, *_differentiable(step, tensors, constants, wanted, gradient)
        x, grain, noise_scale, scale, shift, weight, bias = tensors
        dtype = gradient.dtype

        # Make anew what was not kept.
        if step.keep:
            y, inner = saved[9:]
            spare = torch.empty_like(y)
        else:
            y = _noisy(x, grain, noise_scale).sub_(_wide(mean))
            spare = torch.empty_like(y)
            inner = _activate(step, y, scale, shift, rstd, spare).to(dtype)

        # Backward through the convolution and the activation.
        asked = (True, wanted[5], bias is not None and wanted[6])
        slope, dweight, dbias = convolution_backward(gradient, inner, weight.to(dtype), bias, step.padding, asked)
        if step.slope != 1:
            torch.ops.aten.leaky_relu_backward.grad_input(slope, inner, step.slope, True, grad_input=slope)
        slope = slope.to(y.dtype)
        del inner

        # Gradients of scale and shift; the batch norm's sums come out of them.
        torch.mul(slope, y, out=spare)
        if step.pixels is None:
            per_channel = rstd.view(-1, 1, 1)
            dscale, dshift = spare * per_channel, slope
            factor = (1 + scale) * per_channel
            torch.mul(factor, slope, out=spare)
            sums = _per_channel(spare), _dots(spare, y)
        else:
            dshift, dscale = _sum_up(slope, shift, step.pixels), _sum_up(spare, scale, step.pixels)
            factor = (1 + scale) * rstd.view(-1, 1)
            sums = (factor * dshift).sum((0, 2)), (factor * dscale).sum((0, 2))
            dscale = dscale * rstd.view(-1, 1)
            _look_up(factor, step.pixels, out=spare).mul_(slope)
        del slope

        # Backward through the batch norm: `spare` is the gradient as if its statistics were constants.
        if step.training:
            total = wide_sum(torch.cat(sums)) / ctx.count
            first, second = total.to(y.dtype).chunk(2)
            spare.addcmul_(y, _wide(second * rstd.square()), value=-1).sub_(_wide(first))
        dnoise = _dots(spare, grain).view_as(noise_scale) if wanted[2] else None
        return (
            None,
            spare.to(x.dtype),
            None,
            dnoise,
            dscale.to(scale.dtype),
            dshift.to(shift.dtype),
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(bias.dtype),
        )


def _differentiable(
    step: Step,
    tensors: list[Tensor | None],
    constants: tuple[Tensor, Tensor] | None,
    wanted: tuple[bool, ...],
    gradient: Tensor,
) -> list[Tensor | None]:
    """The gradients as operations that can be differentiated in their turn."""
    with torch.enable_grad():
        out = plain_norm_conv(step, tensors, constants)
        asked = [tensor for tensor, want in zip(tensors, wanted, strict=True) if want]
        found = iter(torch.autograd.grad(out, asked, gradient.to(out.dtype), create_graph=True))
    return [next(found) if want else None for want in wanted]


def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight and bias of a convolution of stride 1, as far as they are wanted."""
    sizes = None if bias is None else [len(bias)]
    geometry = [1, 1], [padding] * 2, [1, 1], False, [0, 0], 1
    return torch.ops.aten.convolution_backward(gradient, x, weight, sizes, *geometry, list(wanted))


def compute_dtype(weight: Tensor) -> torch.dtype:
    """What the convolution computes in."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _noisy(x: Tensor, grain: Tensor, noise_scale: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, noise_scale.dtype)
    return torch.addcmul(x.to(wide), grain.to(wide), noise_scale)


def _center(step: Step, y: Tensor) -> tuple[Tensor, Tensor, Tensor | int]:
    """Subtract the mean in place; mean, variance and number of values, of all ranks together."""
    count = y.numel() // y.shape[1]
    if not step.training:
        mean = step.norm.running_mean.to(y.dtype)
        y.sub_(_wide(mean))
        return mean, step.norm.running_var.to(y.dtype), count
    local = _per_channel(y) / count
    y.sub_(_wide(local))
    mean, variance, count = pooled_moments(local, _dots(y, y) / count, count)
    if ranks.more_than_one():
        y.sub_(_wide(mean - local))
    step.norm.track(mean, variance, count)
    return mean, variance, count


def _activate(step: Step, y: Tensor, scale: Tensor, shift: Tensor, rstd: Tensor, spare: Tensor) -> Tensor:
    """act(y * rstd * (1 + scale) + shift), for a y that is centred; `spare` is written over and may be y."""
    if step.pixels is None:
        out = (scale + 1).mul_(rstd.view(-1, 1, 1)).mul_(y).add_(shift)
    else:
        out = _look_up((1 + scale) * rstd.view(-1, 1), step.pixels).view_as(y).mul_(y)
        out.add_(_look_up(shift, step.pixels, out=spare))
    return F.leaky_relu_(out, step.slope) if step.slope != 1 else out


def _look_up(table: Tensor, pixels: Tensor, out: Tensor | None = None) -> Tensor:
    """The row of each pixel, channel by channel: [B,C,kinds] to [B,C,H*W], or into `out` [B,C,H,W]."""
    index = pixels.expand(-1, table.shape[1], -1)
    if out is None:
        return table.gather(2, index)
    torch.gather(table.to(out.dtype), 2, index, out=out.flatten(2))
    return out


def _sum_up(pictures: Tensor, table: Tensor, pixels: Tensor) -> Tensor:
    """The sum over the pixels of each row of a table: the transpose of `_look_up`."""
    index = pixels.expand(-1, table.shape[1], -1)
    return torch.zeros_like(table, dtype=pictures.dtype).scatter_add_(2, index, pictures.flatten(2))


def _per_channel(x: Tensor) -> Tensor:
    """The sum of each channel."""
    return x.sum((2, 3)).sum(0)


def _dots(x: Tensor, y: Tensor) -> Tensor:
    """The sum of each channel of a product; y has as many channels, or one."""
    if x.device.type != "cpu":
        return (x * y).sum((0, 2, 3))
    # Dot products of rows, one a picture and channel: torch's sum over several dimensions is ten times slower here.
    if y.shape[1] == 1:
        return (x.flatten(2) @ y.flatten(2).to(x.dtype).mT).sum((0, 2))
    rows, columns = x.flatten(2).flatten(0, 1).unsqueeze(1), y.flatten(2).flatten(0, 1).unsqueeze(2)
    return (rows @ columns).view(x.shape[:2]).sum(0)


def _wide(channels: Tensor) -> Tensor:
    return channels.view(-1, 1, 1)


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)
