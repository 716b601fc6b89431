"""Spectral norm, with the same steps as in the networks that were published with it."""

from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

WARM_UP = 15
L = TypeVar("L", bound=nn.Module)


class SpectralNorm(nn.Module):
    """A weight divided by its largest singular value (Miyato et al. 2018), as a parametrisation of a layer.

    Each forward in training improves the estimate by one power iteration; a forward in evaluation does not. An
    iteration moves v first and then u. torch's own parametrisation moves u first. So with the u and v of a network
    that was published with torch.nn.utils.spectral_norm (SPADE, SEAN), its first training step has other weights.
    """

    _u: Tensor
    _v: Tensor

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        matrix = weight.detach().flatten(1)
        self.register_buffer("_u", F.normalize(torch.randn_like(matrix[:, 0]), dim=0))
        self.register_buffer("_v", F.normalize(torch.randn_like(matrix[0]), dim=0))
        # Without this, the first forwards would divide by a bad estimate. Where weights have no values, neither have u
        # and v, and torch would need longer for it than where they have some.
        for _ in range(0 if matrix.is_meta else WARM_UP):
            self._iterate(matrix)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight with a largest singular value of one. To the gradient, u and v are constants."""
        with full_precision(weight.device.type):
            weight = weight.to(self._u.dtype)  # the option bf16 gathers it in half precision
            matrix = weight.flatten(1)
            if self.training:
                self._iterate(matrix.detach())
            # Copy u and v, because the next forward may overwrite them before this one's backward.
            return Normalised.apply(weight, self._u.clone(), self._v.clone())

    @torch.no_grad()
    def _iterate(self, matrix: Tensor) -> None:
        # Miyato et al. 2018, equations 10 to 12.
        self._v.copy_(F.normalize(torch.mv(matrix.t(), self._u), dim=0))
        self._u.copy_(F.normalize(torch.mv(matrix, self._v), dim=0))


class Normalised(torch.autograd.Function):
    """weight / (u . weight v). torch's own backward takes five tensors of the weight's size; this one takes one."""

    @staticmethod
    def forward(ctx, weight: Tensor, u: Tensor, v: Tensor) -> Tensor:  # noqa: ANN001
        largest = _largest(weight, u, v)
        ctx.save_for_backward(weight, u, v, largest)
        return weight / largest

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN001
        weight, u, v, largest = ctx.saved_tensors
        if torch.is_grad_enabled():
            largest = _largest(weight, u, v)
        # Miyato et al. 2018, equation 12: the singular value's own gradient is u vT.
        along = torch.dot(gradient.flatten(), weight.flatten()) / largest.square()
        slope = (gradient / largest).flatten(1)
        slope = torch.addr(slope, u * along, v, alpha=-1) if torch.is_grad_enabled() else slope.addr_(u * -along, v)
        return slope.view_as(weight), None, None


def _largest(weight: Tensor, u: Tensor, v: Tensor) -> Tensor:
    return torch.dot(u, torch.mv(weight.flatten(1), v))


def full_precision(kind: str) -> AbstractContextManager:
    # Half precision has too few digits to tell neighbouring singular values apart. ("meta" and programs have no
    # autocast.)
    known = torch.amp.is_autocast_available(kind) and not torch.compiler.is_exporting()
    return torch.autocast(kind, enabled=False) if known else nullcontext()


def spectral_norm(layer: L) -> L:
    """Give a layer spectral norm, in place. Its weight must have its starting values already."""
    parametrize.register_parametrization(layer, "weight", SpectralNorm(layer.get_parameter("weight")))
    return layer
