"""Random draws that belong to a sample: they do not change with the number of ranks or micro-batches.

Inside a phase, every row of a batch has a place in the global batch. Each draw makes a row for each sample, from
(seed, step, phase, call, place) alone. So any rank that holds the sample draws the same row. With `common=True` there
is one draw for the whole global batch: a coin, or a time, that all ranks share.

Outside a phase the draws are torch's own functions.

[Note: blocks of rows]
A draw is one tensor for the whole global batch, from which a rank takes its rows. Its rows are cut into blocks, and
torch's own kernel fills each block, from a seed of the block's own. So a rank makes only the blocks with rows of its
own, and of these at most the two at the ends for nothing:

    block 0   rows 0 to 3        rank 0
    block 1   rows 4 to 7        rank 0, rank 1 (which throws away rows 4 and 5)
    block 2   rows 8 to 11       rank 1

How large a block is depends on the draw alone, never on the rank.

[Note: pages]
To seed a generator for each small draw would take longer than to draw. So small draws on a CPU take their numbers from
pages of PAGE numbers, which are filled, each from a seed of its own, when they are needed. Where a draw begins depends
only on how many numbers the draws before it have taken, for the whole global batch. So every rank finds its rows by
counting. A rank for which another one computes a part of a network adds what the draws there have taken.
"""

import math
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan.files.errors import UserError
from gan.files.loading import not_compiled
from gan.place import GROUP, TAKEN, Place, current, here, seed_for
from gan.place import Drawn as Drawn
from gan.place import at as at
from gan.place import go_to as go_to

SMALL, FEW_ROWS, LARGE, PARTS = 2**10, 8, 2**17, 16  # sizes of a block: see `_rows_of_a_block`
# One launch for most draws. A GPU writes a block in some 30 us, and no rank draws more than two of them for nothing.
OF_ACCELERATOR = 2**24
FEW, PAGE = 256, 1024  # numbers that a draw from a page has at most, and a page
NORMAL, UNIFORM = Tensor.normal_, Tensor.uniform_


# ---- blocks ----


@cache
def _generator(device: torch.device, thread: int) -> torch.Generator:
    """Each thread has its own, for loaders may draw in threads. Making one costs as much as a draw."""
    return torch.Generator(device)


def seeded(device: torch.device, seed: int) -> torch.Generator:
    """This thread's generator, begun anew."""
    return _generator(device, threading.get_ident()).manual_seed(seed)


def fill(out: Tensor, draw: Callable[..., Any], place: Place, call: int, parts: Sequence[range] | None) -> Tensor:
    """Fill a contiguous tensor with these rows of a draw. See [Note: blocks of rows].

    `draw(tensor, generator=...)` fills a tensor. Without `parts` all rows of the draw are here.
    """
    token = current.set(None)  # torch's own kernels fill a block: see strategies/draws.py
    try:
        return _fill(out, draw, place, call, parts)
    finally:
        current.reset(token)


def _fill(out: Tensor, draw: Callable[..., Any], place: Place, call: int, parts: Sequence[range] | None) -> Tensor:
    shape, device = out.shape, out.device
    count = shape[0] if shape else 1
    total = count if parts is None else place.whole(count)
    high = _rows_of_a_block(total, out.numel() // (count or 1), out.is_cpu)
    if high >= total and parts is None:
        draw(out, generator=seeded(device, place.seed(call, 0)))
        return out
    at, last, block = 0, -1, out
    for part in (range(total),) if parts is None else parts:
        assert not part or part[-1] < total
        while part:
            number, top = divmod(part[0], high)
            size = min(high, total - number * high)
            taken = min(len(part), -(-(size - top) // part.step))
            target = out if taken == count else out[at : at + taken]
            if taken == size:
                draw(target, generator=seeded(device, place.seed(call, number)))
            else:
                if number != last:  # two copies of the samples may share a block
                    last, block = number, out.new_empty(size, *shape[1:])
                    draw(block, generator=seeded(device, place.seed(call, number)))
                target.copy_(block[top : top + taken * part.step : part.step])
            part, at = part[taken:], at + taken
    return out


@cache
def _rows_of_a_block(total: int, width: int, cpu: bool) -> int:
    """How many rows a block has, of a draw of so many rows: a power of two, so that ranks seldom share a block.

    A block costs as much as about a thousand numbers on a CPU, beside its own numbers. So it should not be smaller.
    But then it should have a few rows only, and be a small part of the draw, because a rank may throw most of it away.
    """
    size = max(SMALL, min(FEW_ROWS * width, FEW_ROWS * SMALL), min(total * width // PARTS, LARGE))
    size = size if cpu else OF_ACCELERATOR
    return total if total * width <= size else 1 << (size // width or 1).bit_length() - 1


# ---- pages ----


def _paged(
    draw: Callable[..., Any], shape: tuple[int, ...], dtype: torch.dtype, place: Place, parts: Any, taken: int
) -> Tensor:
    """These rows of the next draw, which takes so many numbers from pages. See [Note: pages]."""
    begin = (place.calls >> TAKEN) * GROUP
    number, begin = begin // PAGE, begin % PAGE
    page, steps = _page(draw, dtype, place, number), _steps(shape)
    if begin + taken > PAGE:
        page = torch.cat([page, _page(draw, dtype, place, number + 1)])
    place.next_call(taken)
    if parts is None:
        return torch.as_strided_copy(page, shape, steps, begin)
    row, *inner = steps
    found = [
        torch.as_strided_copy(page, (len(part), *shape[1:]), (part.step * row, *inner), begin + part.start * row)
        for part in parts
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def _page(draw: Callable[..., Any], dtype: torch.dtype, place: Place, number: int) -> Tensor:
    page = place.pages.get((draw, dtype, number))
    if page is None:
        page = torch.empty(PAGE, dtype=dtype, device="cpu")
        place.pages[draw, dtype, number] = fill(page, draw, place, _kind(draw, dtype) + number, None)
    return page


@cache
def _kind(draw: Callable[..., Any], dtype: torch.dtype) -> int:
    """The seed of the first page, far from the numbers of calls."""
    return seed_for(draw.__name__, str(dtype))


@cache
def _steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """How far apart in memory neighbours of each dimension lie."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


# ---- draws ----


def randn(shape: Sequence[int], like: Tensor | None = None, *, common: bool = False) -> Tensor:
    """Normal noise, a row for each sample, with the device and dtype of `like`."""
    return _draw(NORMAL, shape, like, common)


def rand(shape: Sequence[int], like: Tensor | None = None, *, common: bool = False) -> Tensor:
    """Uniform noise in [0, 1), a row for each sample, with the device and dtype of `like`."""
    return _draw(UNIFORM, shape, like, common)


def randint(low: int, high: int, shape: Sequence[int], like: Tensor | None = None, *, common: bool = False) -> Tensor:
    """Whole numbers from `low` to `high - 1`, a row for each sample, as int64 on the device of `like`."""
    if low >= high:
        raise UserError(f"noise.randint({low}, {high}) has no number to draw, because {high} is never drawn")

    def draw(out: Tensor, generator: torch.Generator | None) -> Tensor:
        return out.random_(low, high, generator=generator)

    return _draw(draw, shape, like, common, torch.int64)


def _draw(
    draw: Callable[..., Any], shape: Sequence[int], like: Tensor | None, common: bool, dtype: torch.dtype | None = None
) -> Tensor:
    if torch.compiler.is_compiling():  # not_compiled by itself would cost more than a small draw
        return _outside_graphs(draw, shape, like, common, dtype)
    device = None if like is None else like.device
    if dtype is None:
        dtype = torch.get_default_dtype() if like is None else like.dtype
        if not dtype.is_floating_point:
            raise UserError(f"noise has the dtype of `like`, which is {dtype}; type like=x.float(), or noise.randint")
    place = current.get()
    if place is None:  # torch's own functions do no more than this
        return draw(torch.empty(shape, device=device, dtype=dtype), generator=None)
    if not (common or len(shape)):
        raise UserError("noise without a shape has no row for each sample; type common=True, if all samples share it")
    # In float64 the numbers of float32, so that every precision draws the same.
    single, shape = torch.float32 if dtype is torch.float64 else dtype, tuple(shape)
    parts = None if common else place.numbers_of(shape[0])
    numbers = math.prod(shape) if parts is None else place.whole(shape[0]) * math.prod(shape[1:])
    taken = numbers if 0 < numbers <= FEW and (draw is NORMAL or draw is UNIFORM) else 0
    if taken and (torch.empty(0) if like is None else like).is_cpu:
        out = _paged(draw, shape, single, place, parts, taken)
    else:
        out, call = torch.empty(shape, device=device, dtype=single), place.next_call(taken)
        if not out.is_meta:
            fill(out, draw, place, call, parts)
    return out.double() if dtype is torch.float64 else out


_outside_graphs = not_compiled(_draw)  # a compiled graph would keep the numbers of its first call


# ---- dropout ----


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """torch.nn.functional.dropout with a mask for each sample: the rows of `x` are samples."""
    if here() is None or not training:
        return F.dropout(x, p, training, inplace)
    if not 0 <= p <= 1:
        raise UserError(f"dropout: p={p} is not between 0 and 1")
    # In float32 whatever x is, so that every precision drops the same.
    kept = _draw(UNIFORM, x.shape, x, False, torch.float32) >= p
    mask = kept.to(x.dtype).mul_(1 / (1 - p) if p < 1 else 0)
    return x.mul_(mask) if inplace else x * mask


class Dropout(nn.Dropout):
    """nn.Dropout with a mask that follows the sample."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p, self.training, self.inplace)


def convert_dropout(module: nn.Module) -> None:
    """Let every nn.Dropout inside follow the sample, in place: objects and state-dict keys stay the same.

    Dropout of other kinds follows the sample in losses, like all that torch draws there (strategies/draws.py).
    """
    for child in module.modules():
        if type(child) is nn.Dropout:
            child.__class__ = Dropout
