"""Random draws that belong to a sample: they do not change with the number of ranks or micro-batches.

Inside a phase, every row of a batch has a place in the global batch. Each draw makes a row for each sample, from
(seed, step, phase, call, place) alone. So any rank that holds the sample draws the same row. With `common=True` there
is one draw for the whole global batch: a coin, or a time, that all ranks share.

In Lightning's hooks all ranks share a draw. Outside of phases and hooks, and in a hook after torch.manual_seed, draws
are torch's own functions.

[Note: blocks of rows]
A draw is one tensor for the whole global batch, from which a rank takes its rows. Its rows are cut into blocks, and
torch's own kernel fills each block, from a seed of the block's own. So a rank makes only the blocks with rows of its
own, and of these at most the two at the ends for nothing:

    block 0   rows 0 to 3        rank 0
    block 1   rows 4 to 7        rank 0, rank 1 (which throws away rows 4 and 5)
    block 2   rows 8 to 11       rank 1

How large a block is depends on the draw alone, never on the rank. A small draw is a single block.
"""

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gan.files.errors import UserError
from gan.files.loading import not_compiled

SMALL, FEW_ROWS, LARGE, PARTS = 2**10, 8, 2**17, 16  # sizes of a block: see `_rows_of_a_block`
# One launch for most draws. A GPU writes a block in some 30 us, and no rank draws more than two of them for nothing.
OF_ACCELERATOR = 2**24
Draw = Callable[..., Tensor]  # fills a tensor: draw(tensor, generator=...)
COPIES = 4  # so many rows for each sample are taken for rows of samples, where no trial has shown it
MASK = 2**64 - 1


def seed_for(*parts: int | str) -> int:
    """A seed made of parts, the same on every machine. Parts that differ by one give unrelated seeds."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little") >> 1


Site = tuple[str | int, ...]
OF_SEED = 1 << 32  # the numbers of draws after a seed of the author's begin here
OF_LOOP = 40  # so many bits are free for the numbers of draws that count as one


class Drawn(NamedTuple):
    """A draw of a network by torch's own functions.

    `rows` is how many samples were computed where it was drawn. `dim` is the dimension of the samples; None is one draw
    for the whole batch. `whole`: they were all, so the draw is the same whichever dimension is that of samples.
    `beside`: several rows of one sample lie side by side, as the heads of attention do. `site` is the place in the code
    that asked for it. `guessed`: no trial has shown a draw of this site.
    """

    name: str
    shape: tuple[int, ...]
    rows: int
    dim: int | None
    whole: bool = False
    beside: bool = False
    site: Site = ()
    guessed: bool = False

    def like(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a draw is of this kind. What is before the samples is often a time, and varies."""
        return self.name == name and (len(self.shape) == len(shape) if self.dim else self.shape[1:] == tuple(shape[1:]))


@dataclass
class Place:
    """Which rows of the global batch are being computed: `rows` rows of `total`, every `stride`-th from `first` on.

    `others` is for a batch of several loaders with batch sizes of their own: the first row of each, by its number of
    rows. `calls` counts the draws. A copy of a place continues at the same count, so it draws the same noise.

    The rest is for draws by torch's own functions (strategies/batches/draw_kernels.py). `follows`: they follow the
    sample too. `seeded`: the author has seeded torch here, so torch's own generator draws; `of_seed` counts that.
    `known` are draws of which a trial has shown where their samples are, by call and site. `drawn` are those of the
    phase so far. `made` are those of this place, for a forward that is run again.
    """

    key: tuple[int | str, ...]
    first: int
    rows: int
    total: int
    stride: int = 1
    others: Mapping[int, int] = field(default_factory=dict)
    calls: int = 0
    follows: bool = True
    seeded: bool = False
    of_seed: int = 0
    known: Mapping[tuple[int, Site], Drawn] = field(default_factory=dict)
    drawn: dict[int, Drawn] = field(default_factory=dict)
    made: dict[int, Drawn] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._seed = seed_for(*self.key)

    def next_call(self) -> int:
        if self.seeded:  # numbers of their own, because a fork of torch's state ends where it began
            self.of_seed += 1
            return OF_SEED + self.of_seed - 1
        self.calls += 1
        return self.calls - 1

    @contextmanager
    def one_call(self) -> Iterator[None]:
        """All draws inside the `with` count as one, so how many there are moves no later draw."""
        call = self.next_call()
        with mock.patch.object(self, "calls", call + 1 << OF_LOOP):
            yield

    def seed(self, call: int, number: int) -> int:
        """The seed of a block or row of a draw. It costs little, because there may be many."""
        # The finalizer of SplitMix64 (Steele, Lea and Flood 2014), shortened.
        bits = self._seed + call * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 & MASK
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
        return bits ^ bits >> 27

    def seeds(self, n: int) -> list[int]:
        """A seed for each of n rows. Two copies of a sample have two seeds."""
        call = self.next_call()
        return [self.seed(call, row) for part in self.numbers_of(n) or [range(n)] for row in part]

    def numbers(self, n: int) -> range:
        """The numbers, in the global batch, of the samples of a draw of n rows.

        They are those of the loader that has n rows here. A batch of fakes and reals together has each sample twice.
        """
        first, rows = (self.others[n], n) if n in self.others else (self.first, self.rows)
        return range(first, first + rows * self.stride, self.stride)

    def numbers_of(self, n: int) -> list[range] | None:
        """The rows, of the whole draw, that a draw of n rows has here. None stands for all, in their order."""
        if self.rows == self.total:
            return None
        numbers = self.numbers(n)
        if n == len(numbers):
            return [numbers]
        if n % len(numbers):
            raise UserError(
                f"noise of {n} rows in a phase whose batch has {self.rows}: other ranks would draw other rows than one "
                f"device does; draw a row for each sample and take some, or type common=True for one draw of all ranks"
            )
        total = self.whole(len(numbers))
        starts = range(0, n // len(numbers) * total, total)
        return [range(start + numbers.start, start + numbers.stop, numbers.step) for start in starts]

    @property
    def samples(self) -> int:
        """How many samples are computed here."""
        return self.rows

    def whole(self, n: int) -> int:
        """How many rows a draw of n rows has in the whole global batch."""
        return self.total * n // self.rows

    def drawn_by_network(self, call: int, name: str, shape: Sequence[int], site: Site = ()) -> Drawn:
        """A draw of a network: which dimension has the samples.

        A trial has seen a shape with few samples, and with all ranks' (strategies/batches/draws.py). Without one, what
        looks like a row for each sample, or a few, is taken for it.
        """
        made = self.made.get(call)
        if made is not None and made.shape == shape and (made.name, made.rows) == (name, self.samples):
            self.drawn[call] = made
            return made
        known, guessed = self._known(call, name, shape, site)
        n = shape[0] if shape else 0
        if known is not None:
            n = 0 if known.dim is None else shape[known.dim]
            dim = known.dim if self._fits(n) or self.packs(n) else None
        else:
            dim = 0 if self._fits(n) and n <= COPIES * max(self.samples, *self.others, 1) else None
        beside = known is not None and known.beside and dim == 0
        drawn = Drawn(name, tuple(shape), self.samples, dim, self.samples == self.total, beside, site, guessed)
        self.drawn[call] = self.made[call] = drawn
        return drawn

    def _known(self, call: int, name: str, shape: Sequence[int], site: Site) -> tuple[Drawn | None, bool]:
        """What a trial has shown of this draw, or of one that is like it; and whether that is a guess.

        The site decides: what a loss draws, and how often, may change from step to step. Where torch has compiled a
        network, its draws have other sites than in a trial, so they are guessed.
        """
        kind = name, len(shape)
        found = self.known.get((call, site))
        if found is not None and (found.name, len(found.shape)) == kind:
            return found, False
        everyone = [(at, where, each) for (at, where), each in self.known.items()]
        here = [(at, each) for at, where, each in everyone if where == site and (each.name, len(each.shape)) == kind]
        if here:
            return min(here, key=lambda pair: abs(pair[0] - call))[1], False
        alike = [(at, each) for at, _, each in everyone if each.like(name, shape)]
        guesses = [each for at, each in alike if at == call] or [each for _, each in alike if each.dim]
        return (guesses[0] if guesses else None), True

    def parts_of(self, drawn: Drawn) -> list[range] | None:
        """The rows that a draw of a network has here. None stands for all, in their order."""
        if drawn.dim is None:
            return None
        n = drawn.shape[drawn.dim]
        if self.packs(n) and self.rows < self.total:
            start = self.first * n // self.rows
            return [range(start, start + n)]
        parts = self.numbers_of(self.samples if drawn.beside else n)
        if parts is None or not drawn.beside:
            return parts
        each = n // self.samples
        return [range(number * each, (number + 1) * each) for part in parts for number in part]

    def _fits(self, n: int) -> bool:
        return n > 0 and (n % self.samples == 0 or n in self.others)

    def packs(self, n: int) -> bool:
        """Whether n rows may be one for each pack of neighbouring samples. Micro-batches part neighbours."""
        return self.stride == 1 and 0 < n < self.rows and self.rows % n == 0 and n not in self.others


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


def go_to(place: Place | None, calls: int, seeded: bool = False) -> None:
    """Set the place, and how it draws its next number, for the rest of the innermost `at`."""
    _place.set(place)
    if place is not None:
        place.calls, place.seeded = calls, seeded


@cache
def _generator(device: torch.device, thread: int) -> torch.Generator:
    """Each thread has its own, for loaders may draw in threads. Making one costs as much as a draw."""
    return torch.Generator(device)


def seeded(device: torch.device, seed: int) -> torch.Generator:
    """This thread's generator, begun anew."""
    return _generator(device, threading.get_ident()).manual_seed(seed)


def fill(out: Tensor, draw: Draw, place: Place, call: int, parts: Sequence[range] | None) -> Tensor:
    """Fill a contiguous tensor with these rows of a draw. See [Note: blocks of rows].

    Without `parts` all rows of the draw are here.
    """
    shape, device = out.shape, out.device
    count = shape[0] if shape else 1
    total = count if parts is None else place.whole(count)
    high = _rows_of_a_block(total, out.numel() // (count or 1), out.is_cpu)
    at, last, block = 0, -1, out
    token = _place.set(None)  # torch's own kernels fill a block: see strategies/batches/draw_kernels.py
    try:
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
    finally:
        _place.reset(token)
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


def randn(shape: Sequence[int], like: Tensor | None = None, *, common: bool = False) -> Tensor:
    """Normal noise, a row for each sample, with the device and dtype of `like`."""
    return _draw(Tensor.normal_, shape, like, common)


def rand(shape: Sequence[int], like: Tensor | None = None, *, common: bool = False) -> Tensor:
    """Uniform noise in [0, 1), a row for each sample, with the device and dtype of `like`."""
    return _draw(Tensor.uniform_, shape, like, common)


def randint(low: int, high: int, shape: Sequence[int], like: Tensor | None = None, *, common: bool = False) -> Tensor:
    """Whole numbers from `low` to `high - 1`, a row for each sample, as int64 on the device of `like`."""
    if low >= high:
        raise UserError(f"noise.randint({low}, {high}) has no number to draw, because {high} is never drawn")
    return _draw(lambda out, generator: out.random_(low, high, generator=generator), shape, like, common, torch.int64)


def _draw(
    draw: Draw, shape: Sequence[int], like: Tensor | None, common: bool, dtype: torch.dtype | None = None
) -> Tensor:
    if torch.compiler.is_compiling():  # not_compiled by itself would cost more than a small draw
        return _outside_graphs(draw, shape, like, common, dtype)
    device = None if like is None else like.device
    if dtype is None:
        dtype = torch.get_default_dtype() if like is None else like.dtype
        if not dtype.is_floating_point:
            raise UserError(f"noise has the dtype of `like`, which is {dtype}; type like=x.float(), or noise.randint")
    place = _place.get()
    alone = place is not None and place.total == 1  # as in a hook between phases
    if place is None or (alone and place.seeded):  # torch's own functions do no more than this
        return draw(torch.empty(shape, device=device, dtype=dtype), generator=None)
    if not (common or alone or len(shape)):
        raise UserError("noise without a shape has no row for each sample; type common=True, if all samples share it")
    # The numbers of float32, so that every precision draws the same. torch 2.11 draws no normal number above 3.4 in
    # bfloat16 on a CPU. Uniform ones stay: rounded, some would be 1.
    single = torch.float32 if dtype is torch.float64 or draw is Tensor.normal_ else dtype
    call, parts = place.next_call(), None if common or not shape else place.numbers_of(shape[0])
    out = torch.empty(shape, device=device, dtype=single)
    if not out.is_meta:
        fill(out, draw, place, call, parts)
    return out.to(dtype)


_outside_graphs = not_compiled(_draw)  # a compiled graph would keep the numbers of its first call


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """torch.nn.functional.dropout with a mask for each sample: the rows of `x` are samples."""
    if here() is None or not training:
        return F.dropout(x, p, training, inplace)
    if not 0 <= p <= 1:
        raise UserError(f"dropout: p={p} is not between 0 and 1")
    # In float32 whatever x is, so that every precision drops the same.
    kept = _draw(Tensor.uniform_, x.shape, x, False, torch.float32) >= p
    mask = kept.to(x.dtype).mul_(1 / (1 - p) if p < 1 else 0)
    return x.mul_(mask) if inplace else x * mask


class Dropout(nn.Dropout):
    """nn.Dropout with a mask that follows the sample."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p, self.training, self.inplace)


def convert_dropout(module: nn.Module) -> None:
    """Let every nn.Dropout inside follow the sample, in place: objects and state-dict keys stay the same.

    Dropout of other kinds follows the sample in losses, as all does that torch draws there: see
    strategies/batches/draw_kernels.py.
    """
    for child in module.modules():
        if type(child) is nn.Dropout:
            child.__class__ = Dropout
