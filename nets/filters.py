"""The low-pass filter [1, 3, 3, 1] of StyleGAN and R3GAN, on each channel by itself and in both directions."""

import torch
from torch import Tensor
from torch.nn import functional as F

from nets.convolution import OURS, convolve

TAPS = (1.0, 3.0, 3.0, 1.0)


def taps() -> Tensor:
    """The filter, with a sum of 1, as published weights have it."""
    line = torch.tensor(TAPS) / sum(TAPS)
    return torch.outer(line, line)


def filtered(x: Tensor, padding: int, stride: int = 1) -> Tensor:
    """The filtered picture, with so many zeros around it; of every so many pixels one."""
    if x.device.type in OURS:
        return _means(x, (padding > 0, padding > 1, padding > 2), stride)
    return convolve(x, _of_each(x), stride=stride, padding=padding, groups=x.shape[1])


def doubled(x: Tensor) -> Tensor:
    """Twice the size: zeros in between, and then the filter."""
    if x.device.type in OURS:
        return _means(F.interpolate(x, scale_factor=2), (True, False), 1)
    return convolve(x, 4 * _of_each(x), stride=2, padding=1, groups=x.shape[1], transposed=True)


def _means(x: Tensor, padded: tuple[bool, ...], stride: int) -> Tensor:
    """[1, 3, 3, 1] is [1, 1] three times. A GPU's convolutions of single channels are slow."""
    for number, zeros in enumerate(padded, 1):
        x = F.avg_pool2d(x, 2, stride if number == len(padded) else 1, int(zeros))
    return x


def _of_each(x: Tensor) -> Tensor:
    return taps().to(x.dtype).to(x.device, non_blocking=True).expand(x.shape[1], 1, -1, -1)
