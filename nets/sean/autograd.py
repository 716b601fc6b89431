"""What the two fused operations share: the dtype to compute in, and gradients."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype in which a convolution computes: autocast's where autocast is on."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, padding: int, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The wanted gradients of input, weight and bias of a convolution of stride 1."""
    sizes = None if bias is None else [len(bias)]
    geometry = [1, 1], [padding] * 2, [1, 1], False, [0, 0], 1
    return torch.ops.aten.convolution_backward(gradient, x, weight, sizes, *geometry, list(wanted))


def differentiable_gradients(
    plain: Callable[[], Tensor], tensors: Sequence[Tensor | None], wanted: Sequence[bool], gradient: Tensor
) -> list[Tensor | None]:
    """The wanted gradients of `plain()`, as operations that can be differentiated again."""
    with torch.enable_grad():
        out = plain()
        asked = [tensor for tensor, want in zip(tensors, wanted, strict=True) if want]
        found = iter(torch.autograd.grad(out, asked, gradient.to(out.dtype), create_graph=True))
    return [next(found) if want else None for want in wanted]
