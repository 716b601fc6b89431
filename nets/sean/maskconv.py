"""The mask branch's two convolutions as one operation, which keeps nothing of what lies between them.

The output of the first convolution is among the largest tensors of a layer, but cheap: its input is a one-hot mask.
So backward computes it again. It is written by hand for the reason in [Note: what is kept for backward].
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from nets.sean.autograd import compute_dtype, convolution_backward, differentiable_gradients


def mask_conv(planes: Tensor, first: Tensor, first_bias: Tensor, second: Tensor, bias: Tensor) -> Tensor:
    """conv(relu(conv(planes)))."""
    return _MaskConv.apply(planes, first, first_bias, second, bias)


def plain_mask_conv(planes: Tensor, first: Tensor, first_bias: Tensor, second: Tensor, bias: Tensor) -> Tensor:
    """The same, operation by operation: for the gradient of a gradient."""
    return F.conv2d(_hidden(planes, first, first_bias), second, bias, padding=1)


def _hidden(planes: Tensor, first: Tensor, first_bias: Tensor) -> Tensor:
    return F.relu(F.conv2d(planes, first, first_bias, padding=1), inplace=True)


class _MaskConv(torch.autograd.Function):
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
            return tuple(differentiable_gradients(lambda: plain_mask_conv(*tensors), tensors, wanted, gradient))
        planes, first, first_bias, second, bias = (tensor.to(gradient.dtype) for tensor in tensors)
        hidden = _hidden(planes, first, first_bias)
        dhidden, dsecond, dbias = convolution_backward(gradient, hidden, second, bias, 1, (True, *wanted[3:]))
        dhidden = torch.ops.aten.threshold_backward(dhidden, hidden, 0)
        dplanes, dfirst, dfirst_bias = convolution_backward(dhidden, planes, first, first_bias, 1, wanted[:3])
        gradients = (dplanes, dfirst, dfirst_bias, dsecond, dbias)
        return tuple(
            found.to(tensor.dtype) if found is not None else None
            for found, tensor in zip(gradients, tensors, strict=True)
        )
