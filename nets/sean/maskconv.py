"""The mask branch's two convolutions, without keeping what lies between them.

The first convolution has a one-hot mask for an input and is cheap, its output is among the largest of a layer, and
backward makes it anew. By hand for the reason that is given in [Note: what is kept for backward].
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nets.sean.normconv import compute_dtype, convolution_backward


def mask_conv(planes: Tensor, first: Tensor, first_bias: Tensor, second: Tensor, bias: Tensor) -> Tensor:
    """conv(relu(conv(planes)))."""
    return _MaskConv.apply(planes, first, first_bias, second, bias)


def plain_mask_conv(planes: Tensor, first: Tensor, first_bias: Tensor, second: Tensor, bias: Tensor) -> Tensor:
    """The same, operation by operation; what is differentiated when a gradient's own gradient is asked for."""
    return F.conv2d(_hidden(planes, first, first_bias), second, bias, padding=1)


def _hidden(planes: Tensor, first: Tensor, first_bias: Tensor) -> Tensor:
    return F.relu(F.conv2d(planes, first, first_bias, padding=1), inplace=True)


class _MaskConv(torch.autograd.Function):
    """mask_conv for autograd."""

    @staticmethod
    def forward(ctx, *tensors: Tensor) -> Tensor:  # noqa: ANN001
        dtype = compute_dtype(tensors[1])
        ctx.save_for_backward(*tensors)
        with torch.autocast(tensors[0].device.type, enabled=False):
            return plain_mask_conv(*(tensor.to(dtype) for tensor in tensors))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad
        if torch.is_grad_enabled():
            with torch.enable_grad():
                out = plain_mask_conv(*tensors)
            asked = [tensor for tensor, want in zip(tensors, wanted, strict=True) if want]
            found = iter(torch.autograd.grad(out, asked, gradient.to(out.dtype), create_graph=True))
            return tuple(next(found) if want else None for want in wanted)
        planes, first, first_bias, second, bias = (tensor.to(gradient.dtype) for tensor in tensors)
        hidden = _hidden(planes, first, first_bias)
        dhidden, dsecond, dbias = convolution_backward(gradient, hidden, second, bias, 1, (True, *wanted[3:]))
        dhidden = torch.ops.aten.threshold_backward(dhidden, hidden, 0)
        dplanes, dfirst, dfirst_bias = convolution_backward(dhidden, planes, first, first_bias, 1, wanted[:3])
        slopes = (dplanes, dfirst, dfirst_bias, dsecond, dbias)
        return tuple(
            slope.to(tensor.dtype) if slope is not None else None for slope, tensor in zip(slopes, tensors, strict=True)
        )
