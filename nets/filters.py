"""The low-pass filter [1, 3, 3, 1] of StyleGAN and R3GAN, on each channel by itself and in both directions."""

import torch
from torch import Tensor

from nets.convolution import convolve, in_one_pass

TAPS = (1.0, 3.0, 3.0, 1.0)


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
