"""Random draws that belong to a sample: they do not change with the number of ranks or micro-batches.

Inside a phase, every row of a batch has a place in the global batch. Each draw makes a row for each sample, from
(seed, step, phase, call, place) alone. So any rank that holds the sample draws the same row. With `common=True` there
is one draw for the whole global batch: a coin, or a time, that all ranks share.

Outside a phase the draws are torch's own functions.
"""

import hashlib
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan import splitmix
from gan.errors import UserError


def seed_for(*parts: int | str) -> int:
    """A seed made of parts, the same on every machine. Parts that differ by one give unrelated seeds."""
    return int.from_bytes(_digest(parts, 8), "little") >> 1


def _digest(parts: Sequence[int | str], size: int) -> bytes:
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=size).digest()


@dataclass
class Place:
    """Which rows of the global batch are being computed: `rows` rows of `total`, every `stride`-th from `first` on.

    `others` is for a batch of several loaders with batch sizes of their own: the first row of each, by its number of
    rows. `calls` counts the draws. A copy of a place continues at the same count, so it draws the same noise.
    """

    key: tuple[int | str, ...]
    first: int
    rows: int
    total: int
    stride: int = 1
    others: Mapping[int, int] = field(default_factory=dict)
    calls: int = 0

    def numbers(self, n: int) -> range:
        """The numbers, in the global batch, of the samples of a draw of n rows.

        They are those of the loader that has n rows here. A batch of fakes and reals together has each sample twice.
        """
        first, rows = (self.others[n], n) if n in self.others else (self.first, self.rows)
        return range(first, first + rows * self.stride, self.stride)

    def seeds(self, n: int) -> list[int]:
        """A seed for each of n rows. Two copies of a sample have two seeds."""
        call, numbers = self._next_call(), self.numbers(n)
        return [seed_for(*self.key, call, numbers[row % len(numbers)], row // len(numbers)) for row in range(n)]

    def streams(self, n: int, device: torch.device) -> tuple[Tensor, int]:
        """The same for a draw of n rows: where each row starts, and the step, for gan/splitmix.py."""
        numbers = self.numbers(n)
        if n % len(numbers) and self.rows < self.total:
            raise UserError(
                f"noise of {n} rows in a phase whose batch has {self.rows}: other ranks would draw other rows than one "
                f"device does; draw a row for each sample and take some, or type common=True for one draw of all ranks"
            )
        key, by_number, by_copy, step = self._stream()
        start = torch.arange(numbers.start, numbers.stop, numbers.step, device=device).mul_(by_number).add_(key)
        if n != len(numbers):
            copies = torch.arange(-(-n // len(numbers)), device=device).mul_(by_copy)
            start = (copies.unsqueeze(1) + start).flatten()[:n]
        return start, splitmix.step_of(step)

    def common_stream(self, device: torch.device) -> tuple[Tensor, int]:
        """The same for a draw that all rows share."""
        key, _, _, step = self._stream()
        return torch.full((1,), key, device=device), splitmix.step_of(step)

    def _stream(self) -> tuple[int, ...]:
        return struct.unpack("<4q", _digest((*self.key, self._next_call()), 32))

    def _next_call(self) -> int:
        self.calls += 1
        return self.calls - 1


_place: ContextVar[Place | None] = ContextVar("place", default=None)


def here() -> Place | None:
    """The place that is set now; None outside a phase."""
    return _place.get()


@contextmanager
def at(place: Place | None) -> Iterator[None]:
    """Set the place for the code inside the `with`; None means outside a phase."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


# ---- draws ----


def randn(shape: Sequence[int], like: Tensor | None = None, *, common: bool = False) -> Tensor:
    """Normal noise, a row for each sample, with the device and dtype of `like`."""
    return _draw(torch.randn, splitmix.normal, shape, common, **_floats(like))


def rand(shape: Sequence[int], like: Tensor | None = None, *, common: bool = False) -> Tensor:
    """Uniform noise in [0, 1), a row for each sample, with the device and dtype of `like`."""
    return _draw(torch.rand, splitmix.uniform, shape, common, **_floats(like))


def randint(low: int, high: int, shape: Sequence[int], like: Tensor | None = None, *, common: bool = False) -> Tensor:
    """Whole numbers from `low` to `high - 1`, a row for each sample, as int64 on the device of `like`."""
    if low >= high:
        raise UserError(f"noise.randint({low}, {high}) has no number to draw, because {high} is never drawn")
    draws = partial(torch.randint, low, high), partial(splitmix.integers, low=low, high=high)
    return _draw(*draws, shape, common, device=_device(like), dtype=torch.int64)


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """torch.nn.functional.dropout with a mask for each sample: the rows of `x` are samples."""
    if here() is None or not training:
        return F.dropout(x, p, training, inplace)
    return _dropped(x, x.shape, p, inplace)


@torch.compiler.disable  # a compiled graph would keep the numbers of its first call
def _draw(
    plain: Callable[..., Tensor],
    placed: Callable[..., Tensor],
    shape: Sequence[int],
    common: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Tensor:
    place = here()
    if place is None or device.type == "meta":
        return plain(tuple(shape), device=device, dtype=dtype)
    if common:
        start, step = place.common_stream(device)
    elif len(shape):
        start, step = place.streams(shape[0], device)
    else:
        raise UserError("noise without a shape has no row for each sample; type common=True, if all samples share it")
    return placed(start, step, math.prod(shape if common else shape[1:]), dtype).view(tuple(shape))


def _device(like: Tensor | None) -> torch.device:
    return torch.get_default_device() if like is None else like.device


def _floats(like: Tensor | None) -> dict[str, Any]:
    dtype = torch.get_default_dtype() if like is None else like.dtype
    if not dtype.is_floating_point:
        raise UserError(f"noise has the dtype of `like`, which is {dtype}; type like=x.float(), or use noise.randint")
    return {"device": _device(like), "dtype": dtype}


# ---- dropout as layers ----


def _dropped(x: Tensor, shape: Sequence[int], p: float, inplace: bool) -> Tensor:
    """`x` times a mask of this shape."""
    if not 0 <= p <= 1:
        raise UserError(f"dropout: p={p} is not between 0 and 1")
    # In float32 whatever x is, so that every precision drops the same.
    kept = _draw(torch.rand, splitmix.uniform, shape, False, device=x.device, dtype=torch.float32) >= p
    mask = kept.to(x.dtype).mul_(1 / (1 - p) if p < 1 else 0)
    return x.mul_(mask) if inplace else x * mask


class Dropout(nn.Dropout):
    """nn.Dropout with a mask that follows the sample."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p, self.training, self.inplace)


class _OfChannels:
    """Drops whole channels."""

    def forward(self, input: Tensor) -> Tensor:
        if here() is None or not self.training:
            return super().forward(input)
        if input.dim() != self.dimensions:
            raise UserError(
                f"{type(self).__name__} got {input.dim()} dimensions; to follow the sample it needs all "
                f"{self.dimensions}, of which the first counts the samples"
            )
        return _dropped(input, (*input.shape[:2], *[1] * (input.dim() - 2)), self.p, self.inplace)


class Dropout1d(_OfChannels, nn.Dropout1d):
    dimensions = 3


class Dropout2d(_OfChannels, nn.Dropout2d):
    dimensions = 4


class Dropout3d(_OfChannels, nn.Dropout3d):
    dimensions = 5


FOLLOWING = {nn.Dropout: Dropout, nn.Dropout1d: Dropout1d, nn.Dropout2d: Dropout2d, nn.Dropout3d: Dropout3d}
DROPOUTS = (*FOLLOWING, nn.AlphaDropout, nn.FeatureAlphaDropout)


def convert_dropout(module: nn.Module) -> None:
    """Let every dropout inside follow the sample, in place: objects and state-dict keys stay the same."""
    for child in module.modules():
        child.__class__ = FOLLOWING.get(type(child), type(child))
    for name, child in own_dropouts(module):
        raise UserError(
            f"'{name}' is a {type(child).__name__}, whose dropout cannot follow the sample; build it with dropout 0, "
            f"and call noise.dropout or noise.Dropout where you need it"
        )


def own_dropouts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules inside, with their names, whose dropout draws from torch's own generator."""
    for name, child in module.named_modules():
        if isinstance(child, DROPOUTS) and not isinstance(child, tuple(FOLLOWING.values())):
            rate = child.p
        else:
            rate = child.dropout if isinstance(child, (nn.MultiheadAttention, nn.RNNBase)) else 0
        if rate > 0:
            yield name, child
