"""Convolutions for losses with the gradient of a gradient, as gradient penalties and path lengths have.

[Note: differentiated twice]
torch takes the second derivative of a convolution by convolutions whose kernels are as large as the picture, one for
each group. For gradient penalties and path lengths that was nine tenths of StyleGAN2's step on an H100. Here every
derivative is again a convolution or the gradient of a convolution's weights, which all libraries make fast.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class How(NamedTuple):
    """A transposed convolution goes back the way of the other. `rest`: rows and columns that a stride has left out."""

    stride: int
    padding: int
    groups: int
    transposed: bool
    rest: tuple[int, int] = (0, 0)

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Those that torch's convolutions and their gradients take last."""
        stride, padding = (self.stride,) * 2, (self.padding,) * 2
        return stride, padding, (1, 1), self.transposed, self.rest, self.groups

    def back(self, before: Tensor, weight: Tensor, after: Tensor) -> "How":
        """The convolution back from `after` to the size of `before`."""
        if self.transposed:
            return self._replace(transposed=False, rest=(0, 0))
        height, width = (
            side - (self.stride * (small - 1) + kernel - 2 * self.padding)
            for side, small, kernel in zip(before.shape[2:], after.shape[2:], weight.shape[2:], strict=True)
        )
        return self._replace(transposed=True, rest=(height, width))


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
    transposed: bool = False,
    rest: tuple[int, int] = (0, 0),
) -> Tensor:
    """As torch's conv2d, or conv_transpose2d. See [Note: differentiated twice]."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return _Convolution.apply(x, weight, bias, How(stride, padding, groups, transposed, rest))


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: How) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        with torch.autocast(x.device.type, enabled=False):  # a backward inside of autocast would change the type
            return torch.convolution(x, weight, bias, *how.arguments)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (of_x, of_weight, of_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        back = _Convolution.apply(gradient, weight, None, ctx.how.back(x, weight, gradient)) if of_x else None
        learns = of_weight or of_bias
        learned = _OfWeights.apply(gradient, x, weight.shape, ctx.how, of_bias) if learns else (None, None)
        return back, *learned, None


class _OfWeights(torch.autograd.Function):
    """The gradients of a convolution's weight and of its bias, from that of its result and from its input."""

    @staticmethod
    def forward(
        ctx: Any, gradient: Tensor, x: Tensor, shape: torch.Size, how: How, biased: bool
    ) -> tuple[Tensor | None, ...]:
        ctx.save_for_backward(gradient, x)
        ctx.how = how
        like = x.new_zeros(()).expand(shape)  # for its shape alone
        bias = [shape[1] * how.groups if how.transposed else shape[0]]
        wanted = (False, True, biased)
        return torch.ops.aten.convolution_backward(gradient, x, like, bias, *how.arguments, wanted)[1:]

    @staticmethod
    def backward(ctx: Any, second: Tensor, of_bias: Tensor | None) -> tuple[Tensor | None, ...]:
        (gradient, x), (of_gradient, of_x, *_) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            _Convolution.apply(x, second, of_bias, ctx.how) if of_gradient else None,
            _Convolution.apply(gradient, second, None, ctx.how.back(x, second, gradient)) if of_x else None,
            None,
            None,
            None,
        )
