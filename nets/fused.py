"""What a GPU computes in one pass over memory, by Triton, which comes with torch on Linux.

They are a low-pass filter and an activation. As operations of torch the filter alone took two thirds of the GPU's time
in StyleGAN2's step on an H200. The gradients use the same kernels, so the gradient of a gradient is one pass again.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gan.files.loading import not_compiled
from nets.blocks import SLOPE

BLOCK = 1024  # numbers for each of Triton's programs
MOST = 2**31  # from so many numbers on, a place needs 64 bits


class Filter(NamedTuple):
    """What is done to rows and columns alike.

    `up` - 1 zeros are put between pixels, and `padding` zeros before the first one. Of every `down` results one is
    kept, times `gain`.
    """

    up: int = 1
    down: int = 1
    padding: int = 0
    gain: float = 1.0

    @property
    def turned(self) -> "Filter":
        """The filter for the gradient: the filter is its own mirror image, and has four taps."""
        return Filter(self.down, self.up, 3 - self.padding, self.gain)


@not_compiled
def filtered(x: Tensor, how: Filter, rows: int, columns: int) -> Tensor:
    """Filter each channel of x [B, C, ...] by [1, 3, 3, 1] in both directions, to so many rows and columns."""
    return _Filtered.apply(x, how, rows, columns)


class _Filtered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Filter, rows: int, columns: int) -> Tensor:
        ctx.how, ctx.size = how, x.shape[2:]
        count, channels, height, width = x.shape
        form = torch.contiguous_format if x.is_contiguous() else torch.channels_last
        x = x.contiguous(memory_format=form)
        out = torch.empty((count, channels, rows, columns), dtype=x.dtype, device=x.device, memory_format=form)
        inner = channels if form == torch.channels_last else 1  # numbers between a pixel and the next one
        sizes = (height, width, rows, columns, inner, how.gain / 64)
        _launch(_filter, x, out, *sizes, how.up, how.down, how.padding)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Filtered.apply(gradient, ctx.how.turned, *ctx.size), None, None, None


@triton.jit(do_not_specialize=["total", "height", "width", "rows", "columns"])  # else it is compiled for each size
def _filter(
    x, out, total, height, width, rows, columns, inner, gain,
    UP: tl.constexpr, DOWN: tl.constexpr, PADDING: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    if WIDE:
        block = block.to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    place, channel = at // inner, at % inner
    column, line = place % columns, place // columns
    row, plane = line % rows, line // rows
    kind = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    summed = tl.full([BLOCK], 0, kind)
    for a in tl.static_range(4):
        y = row * DOWN + a - PADDING
        for b in tl.static_range(4):
            z = column * DOWN + b - PADDING
            there = (at < total) & (y >= 0) & (y < height * UP) & (z >= 0) & (z < width * UP)
            if UP > 1:
                there = there & (y % UP == 0) & (z % UP == 0)
            value = tl.load(x + ((plane * height + y // UP) * width + z // UP) * inner + channel, there, 0)
            summed += (3 if a == 1 or a == 2 else 1) * (3 if b == 1 or b == 2 else 1) * value.to(kind)
    tl.store(out + at, summed * gain, at < total)


@not_compiled
def activated(x: Tensor, limit: float | None) -> Tensor:
    """A leaky ReLU and a clamp, in place. x must be dense, in any memory order."""
    return _Activated.apply(x, limit)


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float | None) -> Tensor:
        _launch(_activate, x, x, x, SLOPE, limit, False)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Turned.apply(gradient, *ctx.saved_tensors, ctx.limit), None


class _Turned(torch.autograd.Function):
    """The gradient of the activation's input, from the gradient of its result and from the result."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, result: Tensor, limit: float | None) -> Tensor:
        ctx.save_for_backward(result)
        ctx.limit = limit
        out = torch.empty_like(result)
        if gradient.stride() != result.stride():
            gradient = out.copy_(gradient)
        _launch(_activate, gradient, out, result, SLOPE, limit, True)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Turned.apply(gradient, *ctx.saved_tensors, ctx.limit), None, None


@triton.jit(do_not_specialize=["total"])
def _activate(
    x, out, total, result,
    SLOPE: tl.constexpr, LIMIT: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Activate x. With `TURNED` x is the gradient of an activation's result; `result` decides what passes."""
    block = tl.program_id(0)
    if WIDE:
        block = block.to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    kind = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    value = tl.load(x + at, at < total).to(kind)
    decides = tl.load(result + at, at < total).to(kind) if TURNED else value
    value = tl.where(decides > 0, value, value * tl.full([BLOCK], SLOPE, kind))
    if LIMIT is not None:
        limit = tl.full([BLOCK], LIMIT, kind).to(x.dtype.element_ty).to(kind)  # rounded as in the result
        if TURNED:
            value = tl.where(tl.abs(decides) < limit, value, tl.full([BLOCK], 0, kind))
        else:  # a NaN passes
            value = tl.where(value > limit, limit, tl.where(value < -limit, -limit, value))
    tl.store(out + at, value, at < total)


def _launch(kernel: Any, x: Tensor, out: Tensor, *arguments: Any) -> None:
    """Start a program for each block of `out`. Triton starts them on the current device."""
    here = x.is_cpu or x.device.index == torch.cuda.current_device()
    with nullcontext() if here else torch.cuda.device(x.device):
        total, wide = out.numel(), max(x.numel(), out.numel()) >= MOST
        kernel[triton.cdiv(total, BLOCK),](x, out, total, *arguments, wide, BLOCK)
