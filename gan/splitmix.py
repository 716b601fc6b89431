"""SplitMix64: random numbers that are computed from their place alone, for a whole tensor at once.

[Note: numbers by their place]
SplitMix64 (Steele, Lea and Flood 2014) is the generator of Java's SplittableRandom. No number needs the one before it:

    number i of a row  =  mix(start of the row + i * step)          64 bits; `mix` spreads each bit over all others

So a rank computes the numbers of its own rows, in the same few operations for one row or a thousand. They are
operations on whole numbers, which give the same bits on every device.

A number is used as two halves of 32 bits, in every dtype. So a draw in float32 is the draw in float64, rounded.
"""

import math
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BLOCK = 2**15  # how many numbers a CPU's core computes at a time, so that they stay in its cache
WIDE_BLOCK = 2**24  # the same on other devices, where it only limits the memory


def signed(bits: int) -> int:
    """64 bits, as the number that int64 makes of them."""
    return ((bits & 2**64 - 1) ^ 2**63) - 2**63


def step_of(bits: int) -> int:
    """A step that comes by all 2**64 numbers, and in which bits change often enough (section 2.4 of the paper)."""
    step = bits | 1
    return signed(step if (step ^ step >> 1).bit_count() >= 24 else step ^ 0xAAAAAAAAAAAAAAAA)


def words(start: Tensor, step: int, rows: slice, some: slice) -> Tensor:
    """Some numbers of some rows: int64 [rows, some]."""
    return (_words_on_cpu if start.device.type == "cpu" else _words_on_device)(start, step, rows, some)


def _words_on_cpu(start: Tensor, step: int, rows: slice, some: slice) -> Tensor:
    """In NumPy, which has unsigned numbers, and takes a third of torch's time for a small draw."""
    z = np.arange(some.start, some.stop, dtype=np.uint64)
    z *= np.uint64(step % 2**64)
    z = start.numpy().view(np.uint64)[rows, None] + z
    # `mix`, with the numbers of Stafford 2011, variant 13.
    spare = z >> np.uint64(30)
    z ^= spare
    z *= np.uint64(FACTORS[0])
    z ^= np.right_shift(z, np.uint64(27), out=spare)
    z *= np.uint64(FACTORS[1])
    z ^= np.right_shift(z, np.uint64(31), out=spare)
    return torch.from_numpy(z.view(np.int64))


def _words_on_device(start: Tensor, step: int, rows: slice, some: slice) -> Tensor:
    """The same in torch. Its shift to the right brings ones into negative numbers, which `&` takes out again."""
    places = torch.arange(some.start, some.stop, device=start.device)
    z = torch.add(start[rows].unsqueeze(1), places, alpha=step)
    z.bitwise_xor_((z >> 30).bitwise_and_(2**34 - 1)).mul_(signed(FACTORS[0]))
    z.bitwise_xor_((z >> 27).bitwise_and_(2**37 - 1)).mul_(signed(FACTORS[1]))
    return z.bitwise_xor_((z >> 31).bitwise_and_(2**33 - 1))


def uniform(start: Tensor, step: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Numbers in [0, 1), with as many random bits as the dtype can hold, at most 32."""
    bits = min(32, round(1 - math.log2(torch.finfo(dtype).eps)))
    out = torch.empty(len(start), -(-columns // 2) * 2, dtype=dtype, device=start.device)
    for rows, some in _blocks(len(start), -(-columns // 2), start.device):
        drawn = words(start, step, rows, some).view(torch.int32).bitwise_right_shift_(32 - bits)
        # Each of these steps is exact, so nothing is rounded up to 1.
        torch.add(_constant(0.5, dtype), drawn, alpha=2.0**-bits, out=out[rows, 2 * some.start : 2 * some.stop])
    return out[:, :columns].contiguous()


def normal(start: Tensor, step: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers by Box and Muller 1958: a number's two halves are a radius and an angle, which give two draws."""
    kind = torch.promote_types(dtype, torch.float32)
    out = torch.empty(len(start), 2, -(-columns // 2), dtype=kind, device=start.device)
    for rows, some in _blocks(len(start), out.shape[2], start.device):
        low, high = words(start, step, rows, some).view(torch.int32).view(-1, some.stop - some.start, 2).unbind(2)
        left, right = out[rows, :, some].unbind(1)
        # The radius is sqrt(-2 log |u|). Here u lies evenly around 0, in (-1, 1], and is never 0.
        radius = torch.add(_constant(2.0**-32, kind), low, alpha=2.0**-31).abs_().log_().mul_(-2).sqrt_()
        angle = torch.mul(high, _constant(math.pi * 2.0**-31, kind))
        torch.mul(radius, angle.cos(), out=left)
        torch.mul(radius, angle.sin_(), out=right)
    return out.view(len(start), -1)[:, :columns].contiguous().to(dtype)


def integers(start: Tensor, step: int, columns: int, dtype: torch.dtype, low: int, high: int) -> Tensor:
    """Whole numbers from `low` to `high - 1`."""
    out = torch.empty(len(start), columns, dtype=dtype, device=start.device)
    for rows, some in _blocks(*out.shape, start.device):
        out[rows, some] = words(start, step, rows, some).bitwise_and_(2**63 - 1).remainder_(high - low).add_(low)
    return out


@cache
def _constant(value: float, dtype: torch.dtype) -> Tensor:
    """A number that makes torch compute with whole numbers in this dtype."""
    return torch.tensor(value, dtype=dtype, device="cpu")


def _blocks(rows: int, columns: int, device: torch.device) -> Iterator[tuple[slice, slice]]:
    """All rows and columns, some of them at a time."""
    size = BLOCK * torch.get_num_threads() if device.type == "cpu" else WIDE_BLOCK
    wide = max(1, min(columns, size))
    high = size // wide
    for top in range(0, rows, high):
        for left in range(0, columns, wide):
            yield slice(top, min(top + high, rows)), slice(left, min(left + wide, columns))
