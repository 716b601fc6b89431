"""Small parts that several networks are made of."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan import noise
from gan.errors import UserError
from nets.spectral import spectral_norm

SLOPE = 0.2


def onehot(label: Tensor, labels: int, like: Tensor) -> Tensor:
    """A label map [B,H,W] as `labels` planes of 0 and 1 [B,labels,H,W], in the type of `like`.

    A label out of range is refused here, in words, before it becomes an assert inside a GPU kernel.
    """
    low, high = torch.stack(label.aminmax()).tolist()
    if low < 0 or high >= labels:
        advice = f"build it with labels={high + 1}" if low >= 0 else "give pixels without a label a number of their own"
        raise UserError(
            f"a label map holds label {low if low < 0 else high} and the network knows 0 to {labels - 1}; {advice}"
        )
    planes = torch.arange(labels, device=label.device).view(1, -1, 1, 1)
    return (label.unsqueeze(1) == planes).to(like.dtype)


def resize_nearest(planes: Tensor, size: tuple[int, int]) -> Tensor:
    """One-hot planes at another size, still one-hot."""
    return planes if planes.shape[-2:] == size else F.interpolate(planes, size, mode="nearest")


def xavier_(weight: Tensor, gain: float) -> None:
    """Normal weights with the variance of Glorot and Bengio 2010; with gain 0.02, SPADE's and SEAN's start."""
    nn.init.xavier_normal_(weight, gain)


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
    """A convolution that keeps the size at stride 1, Xavier-normal, with spectral norm where it is asked for.

    Leave out the bias before a norm, which cancels it, unless a published network has one there; then say `normed`.
    """
    kind = NormedConv2d if normed else nn.Conv2d
    layer = kind(inside, outside, kernel, stride, kernel // 2 if padding is None else padding, bias=bias)
    xavier_(layer.weight, gain)
    if bias:
        nn.init.zeros_(layer.bias)
    # The weights come first: spectral norm starts its singular vectors from them.
    return spectral_norm(layer) if spectral else layer


class NormedConv2d(nn.Conv2d):
    """A convolution whose bias a norm cancels in training, as some published networks have it.

    [Note: biases that a norm cancels]
    A norm by statistics of the batch or the picture takes away what is the same in a whole channel, so in training
    such a bias changes nothing and its gradient is zero. Computed, it is rounding noise, which differs from one
    world size to the next and which Adam blows up, in float32 to full steps. Here it is exactly zero. In evaluation
    a batch norm's statistics are constants, and the bias counts like any other. (Nothing here notices a batch norm
    that is put in evaluation while the layer before it trains.)
    """

    def forward(self, x: Tensor) -> Tensor:
        """The convolution. See [Note: biases that a norm cancels]."""
        return F.conv2d(x, self.weight, bias_of(self), self.stride, self.padding)


class NormedConvTranspose2d(nn.ConvTranspose2d):
    """The same for a transposed convolution."""

    def forward(self, x: Tensor) -> Tensor:
        """The convolution. See [Note: biases that a norm cancels]."""
        bias = still(self.bias) if self.training else self.bias
        return F.conv_transpose2d(x, self.weight, bias, self.stride, self.padding, self.output_padding)


def bias_of(layer: nn.Conv2d) -> Tensor | None:
    """The bias as the layer's own forward adds it."""
    return still(layer.bias) if isinstance(layer, NormedConv2d) and layer.training else layer.bias


def still(parameter: Tensor) -> Tensor:
    """The same values with a gradient of exactly zero; none at all would look like a parameter that is not used."""
    return parameter.detach() + 0 * parameter


class Dropout(nn.Module):
    """Dropout that follows the sample, and that stays on in evaluation: pix2pix's only source of variety."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Zero a share `p` of the values and scale the others up."""
        keep = noise.rand(x.shape, like=x) >= self.p
        return x * keep / (1 - self.p)
