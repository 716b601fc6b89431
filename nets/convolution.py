"""Convolutions, and the low-pass filter of StyleGAN and R3GAN, for losses with the gradient of a gradient.

[Note: differentiated twice]
torch takes the second derivative of a convolution by convolutions whose kernels are as large as the picture, one for
each group. For gradient penalties and path lengths that was nine tenths of StyleGAN2's step on an H100. Here every
derivative is again a convolution or the gradient of one, which all libraries make fast. On a CPU torch's own way takes
nine tenths of the time of ours, so it stays there.
"""

import warnings
from functools import reduce
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from gan.files.errors import reason
from gan.files.loading import not_compiled

OURS = {"cuda"}  # kinds of devices on which torch's own way is slower
TRITON: dict[torch.device, bool] = {}  # whether it works there
How = tuple[Any, ...]  # the last arguments of torch's convolutions and of their gradients
TAPS = (1.0, 3.0, 3.0, 1.0)  # of the filter, on each channel by itself and in both directions


def in_one_pass(x: Tensor) -> bool:
    """Whether nets/fused.py computes with x."""
    if x.device.type not in OURS or not (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)):
        return False
    if x.device not in TRITON:
        TRITON[x.device] = _triton_works(x.device)
    return TRITON[x.device]


@not_compiled
def _triton_works(device: torch.device) -> bool:
    """Triton is on Linux only, needs a C compiler, and a GPU that is not too old for the type."""
    if find_spec("triton") is None:
        return False
    from nets import fused

    try:
        for dtype in (torch.float32, torch.bfloat16):
            fused.activated(torch.ones(1, device=device, dtype=dtype), 1.0)
    except Exception as error:  # noqa: BLE001, of the compiler, the driver or Triton
        warnings.warn(
            f"Triton does not work on {device} ({reason(error)}), so StyleGAN2 and R3GAN train slower there",
            stacklevel=2,
        )
        return False
    return True


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    transposed: bool = False,
) -> Tensor:
    """As torch's conv2d, or conv_transpose2d. See [Note: differentiated twice]."""
    kind, how = x.device.type, ((stride,) * 2, (padding,) * 2, (1, 1), transposed, (0, 0), groups)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return (_Convolution.apply if kind in OURS else _convolution)(x, weight, bias, how)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
    with torch.autocast(x.device.type, enabled=False):  # it would change the type in a backward too
        return torch.convolution(x, weight, bias, *how)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return _convolution(x, weight, bias, how)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return *_Gradients.apply(slope, *ctx.saved_tensors, ctx.how, ctx.needs_input_grad[:3]), None


class _Gradients(torch.autograd.Function):
    """The gradients of a convolution's input, weight and bias, where they are wanted, from its result's, `slope`."""

    @staticmethod
    def forward(
        ctx: Any, slope: Tensor, x: Tensor, weight: Tensor, how: How, wanted: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(slope, x, weight)
        ctx.set_materialize_grads(False)
        ctx.how = how
        bias = [slope.shape[1]]
        return torch.ops.aten.convolution_backward(slope, x, weight, bias, *how, wanted)

    @staticmethod
    def backward(
        ctx: Any, of_x: Tensor | None, of_weight: Tensor | None, of_bias: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        (slope, x, weight), how = ctx.saved_tensors, ctx.how
        slope_wanted, x_wanted, weight_wanted, *_ = ctx.needs_input_grad
        parts: list[Tensor] = []
        if slope_wanted and of_x is not None:
            parts.append(_Convolution.apply(of_x, weight, None, how))
        if slope_wanted and of_weight is not None:
            parts.append(_Convolution.apply(x, of_weight, None, how))
        if slope_wanted and of_bias is not None:
            parts.append(of_bias[:, None, None].expand_as(slope))
        more_of_x = more_of_weight = None
        if x_wanted and of_weight is not None:
            more_of_x, _, _ = _Gradients.apply(slope, x, of_weight, how, (True, False, False))
        if weight_wanted and of_x is not None:
            _, more_of_weight, _ = _Gradients.apply(slope, of_x, weight, how, (False, True, False))
        return reduce(torch.add, parts) if parts else None, more_of_x, more_of_weight, None, None


def taps() -> Tensor:
    """The filter, with a sum of 1, as published weights have it."""
    line = torch.tensor(TAPS) / sum(TAPS)
    return torch.outer(line, line)


def filtered(x: Tensor, padding: int, stride: int = 1) -> Tensor:
    """The filtered picture, with so many zeros around it; of every so many pixels one."""
    if in_one_pass(x):
        from nets import fused

        rows, columns = ((side + 2 * padding - len(TAPS)) // stride + 1 for side in x.shape[2:])
        return fused.filtered(x, fused.Filter(down=stride, padding=padding), rows, columns)
    return convolve(x, _of_each(x), stride=stride, padding=padding, groups=x.shape[1])


def doubled(x: Tensor) -> Tensor:
    """Twice the size: zeros in between, and then the filter."""
    if in_one_pass(x):
        from nets import fused

        return fused.filtered(x, fused.Filter(up=2, padding=2, gain=4.0), 2 * x.shape[2], 2 * x.shape[3])
    return convolve(x, 4 * _of_each(x), stride=2, padding=1, groups=x.shape[1], transposed=True)


def _of_each(x: Tensor) -> Tensor:
    return taps().to(x.dtype).to(x.device, non_blocking=True).expand(x.shape[1], 1, -1, -1)
