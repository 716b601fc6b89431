"""Small parts that several networks are made of, and convolutions for losses with the gradient of a gradient.

[Note: differentiated twice]
torch takes the second derivative of a convolution by convolutions whose kernels are as large as the picture, one for
each group. For gradient penalties and path lengths that was nine tenths of StyleGAN2's step on an H100. Here every
derivative is again a convolution or the gradient of one, which all libraries make fast. On a CPU torch's own way takes
nine tenths of the time of ours, so it stays there.
"""

import warnings
from functools import partial, reduce
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan import later, noise
from gan.files.errors import UserError, reason
from gan.files.loading import not_compiled
from nets.spectral import spectral_norm

SLOPE = 0.2
MANY = 256  # channels


def onehot(label: Tensor, labels: int, like: Tensor) -> Tensor:
    """A label map [B,H,W] as `labels` planes of 0 and 1 [B,labels,H,W], with the dtype of `like`.

    A label out of range is refused, in a phase before its update. Inside a GPU kernel it would be a failed assert
    without a message.
    """
    later.read(torch.stack(label.aminmax()), partial(_refuse_others, labels))
    planes = torch.arange(labels, device=label.device).view(1, -1, 1, 1)
    return (label.unsqueeze(1) == planes).to(like.dtype)


def _refuse_others(labels: int, bounds: list[float]) -> None:
    low, high = map(int, bounds)
    if low < 0 or high >= labels:
        advice = f"build it with labels={high + 1}" if low >= 0 else "give pixels without a label a number of their own"
        raise UserError(
            f"a label map holds label {low if low < 0 else high} and the network knows 0 to {labels - 1}; {advice}"
        )


def edges_of(ids: Tensor) -> Tensor:
    """Where one of a pixel's 4 neighbours in [..., H, W] has another number (Wang et al. 2018, pix2pixHD, 3.3)."""
    edges = torch.zeros_like(ids, dtype=torch.bool)
    down, right = ids[..., 1:, :] != ids[..., :-1, :], ids[..., 1:] != ids[..., :-1]
    edges[..., 1:, :] |= down
    edges[..., :-1, :] |= down
    edges[..., 1:] |= right
    edges[..., :-1] |= right
    return edges


def resize_nearest(planes: Tensor, size: tuple[int, int]) -> Tensor:
    """One-hot planes at another size, still one-hot."""
    return planes if planes.shape[-2:] == size else F.interpolate(planes, size, mode="nearest")


def xavier_(weight: Tensor, gain: float) -> None:
    """Normal weights with the variance of Glorot and Bengio 2010. SPADE and SEAN start with gain 0.02."""
    if weight.is_meta:  # there is nothing to fill, and torch would need longer for it than for a small weight
        return
    nn.init.xavier_normal_(weight, gain)


def start_(network: nn.Module, xavier: bool = False) -> None:
    """Begin as pix2pix and CycleGAN do, or with `xavier` as CUT does: small weights, no biases, norms about one."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
            if xavier:
                xavier_(module.weight, 0.02)
            else:
                nn.init.normal_(module.weight, 0.0, 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
            nn.init.normal_(module.weight, 1.0, 0.02)


def conv(
    inside: int,
    outside: int,
    kernel: int,
    stride: int = 1,
    padding: int | None = None,
    *,
    bias: bool = True,
    normed: bool = False,
    spectral: bool = False,
    gain: float = 1.0,
) -> nn.Conv2d:
    """A convolution with Xavier-normal weights that keeps the size at stride 1.

    Before a norm use `bias=False`, because the norm cancels a bias. If a published network has one there, say
    `normed=True`.
    """
    kind = NormedConv2d if normed else nn.Conv2d
    layer = kind(inside, outside, kernel, stride, kernel // 2 if padding is None else padding, bias=bias)
    xavier_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    # Spectral norm comes last: it starts its singular vectors from the weights.
    return spectral_norm(layer) if spectral else layer


def conv_doubling(
    inside: int, outside: int, kernel: int, *, bias: bool = True, normed: bool = False, gain: float = 1.0
) -> nn.ConvTranspose2d:
    """As `conv`, a transposed convolution that doubles the size; the kernel is 3 or 4."""
    kind = NormedConvTranspose2d if normed else nn.ConvTranspose2d
    layer = kind(inside, outside, kernel, 2, 1, output_padding=kernel % 2, bias=bias)
    xavier_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def laid_out(x: Tensor, layer: nn.Module) -> Tensor:
    """In the memory format in which a convolution is fast: on CPUs channels last for few channels only (1.4 times)."""
    assert isinstance(layer.weight, Tensor)
    many = x.is_cpu and min(layer.weight.shape[:2]) >= MANY
    return x.contiguous(memory_format=torch.contiguous_format if many else torch.channels_last)


def middle(x: Tensor, height: int, width: int) -> Tensor:
    """The middle of pictures; of smaller ones, with zeros around them."""
    down, across = height - x.shape[-2], width - x.shape[-1]
    if not (down or across):
        return x
    top, left = int(down / 2), int(across / 2)
    return F.pad(x, (left, across - left, top, down - top))  # a negative one crops


class NormedConv2d(nn.Conv2d):
    """A convolution whose bias a norm cancels in training, as in some published networks.

    [Note: biases that a norm cancels]
    A batch or instance norm removes what is the same in a whole channel. So in training such a bias changes nothing,
    and its true gradient is zero. The computed gradient would be rounding noise, which differs between numbers of
    ranks, and which Adam enlarges, in float32 to full steps. Here the gradient is exactly zero. In evaluation a batch
    norm's statistics are constants, and the bias counts like any other. (We do not notice a batch norm in evaluation
    mode behind a layer in training mode.)
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, bias_of(self), self.stride, self.padding)


class NormedConvTranspose2d(nn.ConvTranspose2d):
    """As NormedConv2d, for a transposed convolution."""

    def forward(self, x: Tensor) -> Tensor:
        bias = without_gradient(self.bias) if self.training else self.bias
        # pyrefly: ignore[bad-argument-type] - only a convolution that is not transposed has padding by a word
        return F.conv_transpose2d(x, self.weight, bias, self.stride, self.padding, self.output_padding)


def bias_of(layer: nn.Conv2d) -> Tensor | None:
    """The bias as the layer's own forward uses it."""
    return without_gradient(layer.bias) if isinstance(layer, NormedConv2d) and layer.training else layer.bias


def without_gradient(parameter: Tensor | None) -> Tensor | None:
    """The same values, with a gradient of exactly zero. With no gradient at all, a parameter would look unused."""
    return None if parameter is None else parameter.detach() + 0 * parameter


def group_norm(channels: int, most: int) -> nn.GroupNorm:
    """A group norm of up to `most` groups of four channels or more. One channel's would cancel the bias before it."""
    return nn.GroupNorm(max(1, min(most, channels // 4)), channels)


class Dropout(noise.Dropout):
    """Dropout that follows the sample and stays on in evaluation: pix2pix's only source of variety."""

    def forward(self, input: Tensor) -> Tensor:
        return noise.dropout(input, self.p)


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
