"""Kinds of neighbourhoods in a label map: what depends on the labels around a pixel is computed once for each kind.

[Note: one row a neighbourhood]
Two 3x3 convolutions of a one-hot mask see the 5x5 labels around a pixel. Masks are made of regions. Inside a region
all neighbourhoods are the same, and there are few kinds of border. A drawn face of 65,536 pixels has some 700 kinds
of 3x3 neighbourhoods and 2,900 kinds of 5x5.

So the first convolution is computed once for each kind of 3x3. The second is computed once for each kind of 5x5, as
a sum of nine rows of the first. Each pixel then looks up its row. Nothing is approximated: pixels outside of the
picture count as one more label. Style codes differ between pictures, so each picture has its own kinds of 5x5.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from gan.files.loading import not_compiled
from nets.blocks import resize_nearest

T = TypeVar("T")
_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def once(source: Tensor, name: Hashable, make: Callable[[], T]) -> T:
    """`make()`, or what it gave when it was last called for this tensor and name.

    It is kept as long as the tensor lives, and made again when the tensor has been written to. It must not hold the
    tensor itself, or the tensor would live for ever. A tensor with a gradient has a graph of its own each time.
    """
    if source.requires_grad or source.is_inference():  # torch does not note writes to an inference tensor
        return make()
    kept: dict[Hashable, tuple[int, Any]] = _made.setdefault(source, {})
    if name not in kept or kept[name][0] != source._version:
        kept[name] = source._version, make()
    return kept[name][1]


CELLS = 9  # of a 3x3 neighbourhood
LIMIT = 2**63


class RowSums:
    """Sums of rows of a table: a product of a matrix of zeros and ones with the table.

    Row `rows[i]` of the result is the sum that table row `entries[i]` is added to. It is deterministic in both
    directions, and its gradient is the same kind of sum, so it can be differentiated as often as you like.
    """

    def __init__(self, rows: Tensor, entries: Tensor, shape: tuple[int, int]) -> None:
        self.forward = _group(rows, entries, shape[0])
        self.backward = _group(entries, rows, shape[1])

    def __call__(self, table: Tensor) -> Tensor:
        """Sums [shape[0], channels] of a table [shape[1], channels]."""
        return _Sum.apply(table, *self.forward, *self.backward)


def _group(rows: Tensor, entries: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The entries sorted by row, and where each row begins and the last one ends."""
    ends = torch.bincount(rows, minlength=count).cumsum(0)
    if (rows[1:] < rows[:-1]).any():
        entries = entries[torch.argsort(rows, stable=True)]
    return entries, F.pad(ends, (1, 0))


class _Sum(torch.autograd.Function):
    """torch's embedding_bag, whose own gradient is slow on a CPU and cannot be differentiated."""

    @staticmethod
    def forward(ctx, table: Tensor, entries: Tensor, begins: Tensor, *back: Tensor) -> Tensor:  # noqa: ANN001
        ctx.save_for_backward(entries, begins, *back)
        return F.embedding_bag(entries, table, begins, mode="sum", include_last_offset=True)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        entries, begins, *back = ctx.saved_tensors
        return _Sum.apply(gradient.contiguous(), *back, entries, begins), None, None, None, None


@dataclass(frozen=True)
class Neighbourhoods:
    """The kinds of neighbourhood in a batch of masks. See [Note: one row a neighbourhood].

    `pixels` [B,1,H*W] is the number of each pixel's kind of 5x5; each picture has room for `kinds` of them.
    `onehot_3x3` [kinds of 3x3, 9*planes] is the one-hot mask of each kind of 3x3. `mask_sums` and `style_sums` make
    the rows of all kinds of 5x5, picture after picture: from a table with nine rows for each kind of 3x3, and from a
    table with nine rows for each picture and label.
    """

    pixels: Tensor
    kinds: int
    onehot_3x3: Tensor
    mask_sums: RowSums
    style_sums: RowSums


@not_compiled  # how many there are depends on the data
def find_neighbourhoods(planes: Tensor, labels: int) -> Neighbourhoods | None:
    """The neighbourhoods of one-hot planes [B,labels,H,W], or with one plane more for edges.

    None where this does not pay, with more kinds of 3x3 than half of the pixels, and where planes are not one-hot or
    not known: an exported program takes any.
    """
    pictures, _, height, width = planes.shape
    if torch.compiler.is_exporting() or not _are_onehot(planes, labels):
        return None
    label = _labels(planes[:, :labels])
    symbol, symbols = label, labels
    for edge in planes[:, labels:].unbind(1):
        symbol, symbols = symbol + symbols * edge.long(), 2 * symbols
    symbol = F.pad(symbol, (2, 2, 2, 2), value=symbols)

    # Number the kinds of 3x3, also on a rim one pixel wide. The 3x3 of its four corners make up a 5x5.
    small, smalls = _kinds([(cell, symbols + 1) for cell in cells_of(symbol)])
    pixels = pictures * height * width
    if 2 * smalls > pixels:
        return None
    picture = torch.arange(pictures, device=planes.device).view(-1, 1, 1).expand(-1, height, width)
    cells = cells_of(small)
    large, larges = _kinds([(picture, pictures), *((cells[corner], smalls) for corner in (0, 2, 6, 8))])

    # Kinds are sorted by picture. Number them within each picture.
    example = _examples(large, larges)
    owner = picture.flatten()[example]
    counts = torch.bincount(owner, minlength=pictures)
    kinds = int(counts.max())
    first = counts.cumsum(0) - counts
    row = owner * kinds + torch.arange(larges, device=planes.device) - first[owner]

    # List what each kind of 5x5 is the sum of, cell by cell. Cells outside of the picture add nothing.
    def around_examples(part: Tensor) -> Tensor:
        return torch.stack([cell.flatten()[example] for cell in cells_of(part)], 1)

    inside = around_examples(F.pad(torch.ones_like(label, dtype=torch.bool), (1, 1, 1, 1)))
    rows = row.unsqueeze(1).expand(-1, CELLS)[inside]
    cell = torch.arange(CELLS, device=planes.device)
    mask = (around_examples(small) * CELLS + cell)[inside]
    style = (around_examples(F.pad(picture * labels + label, (1, 1, 1, 1))) * CELLS + cell)[inside]

    # Take the one-hot mask around one pixel of each kind of 3x3.
    which, down, right = torch.unravel_index(_examples(small, smalls), small.shape)
    down, right = down.unsqueeze(1) + cell // 3, right.unsqueeze(1) + cell % 3
    onehot_3x3 = F.pad(planes, (2, 2, 2, 2)).permute(0, 2, 3, 1)[which.unsqueeze(1), down, right]
    mask_sums = RowSums(rows, mask, (pictures * kinds, smalls * CELLS))
    style_sums = RowSums(rows, style, (pictures * kinds, pictures * labels * CELLS))
    numbers = (large - first[picture]).view(pictures, 1, -1)
    return Neighbourhoods(numbers, kinds, onehot_3x3.flatten(1), mask_sums, style_sums)


def _are_onehot(planes: Tensor, labels: int) -> bool:
    """Whether each pixel has one label, and edges are 0 or 1."""
    label, edges = planes[:, :labels], planes[:, labels:]
    ones = (label.amax(1) == 1) & (label.sum(1) == 1) & (label.square().sum(1) == 1)
    return bool(ones.all()) and bool(((edges == 0) | (edges == 1)).all())


def _labels(planes: Tensor) -> Tensor:
    """The label of each pixel of one-hot planes: a product with the numbers of the labels, for argmax is slow."""
    wide = planes.flatten(2).to(torch.promote_types(planes.dtype, torch.float32))
    numbers = torch.arange(planes.shape[1], dtype=wide.dtype, device=wide.device)
    return (numbers.expand(len(wide), 1, -1) @ wide).view(len(planes), *planes.shape[2:]).long()


def cells_of(padded: Tensor) -> list[Tensor]:
    """The nine neighbours of each pixel, row by row, for a map with a rim one pixel wide."""
    height, width = padded.shape[-2] - 2, padded.shape[-1] - 2
    return [padded[..., y : y + height, x : x + width] for y in range(3) for x in range(3)]


def _kinds(parts: list[tuple[Tensor, int]]) -> tuple[Tensor, int]:
    """Number the distinct combinations of some numbers, each below its bound, in their order, and count them."""
    total, bound = parts[0]
    for part, size in parts[1:]:
        if bound * size >= LIMIT:
            found, total = torch.unique(total, return_inverse=True)
            bound = len(found)
        total, bound = total * size + part, bound * size
    found, total = torch.unique(total, return_inverse=True)
    return total, len(found)


def _examples(kind: Tensor, kinds: int) -> Tensor:
    """Any one pixel of each kind."""
    pixels = torch.arange(kind.numel(), device=kind.device)
    return pixels.new_empty(kinds).scatter_(0, kind.flatten(), pixels)


class Masks:
    """A batch of masks at every size that a generator asks for, each size prepared once.

    Neighbourhoods are used on a CPU only: a GPU convolves faster than it sorts. They are found once for all turns of a
    step that pass the same tensor.
    """

    def __init__(self, planes: Tensor, labels: int) -> None:
        self.planes, self.labels = planes, labels
        self._sizes: dict[tuple[int, int], SizedMasks] = {}

    def at(self, size: tuple[int, int]) -> "SizedMasks":
        if size not in self._sizes:
            if self.planes.device.type == "cpu" and not self.planes.requires_grad:
                self._sizes[size] = _with_neighbourhoods(self.planes, self.labels, size)
            else:
                self._sizes[size] = SizedMasks(resize_nearest(self.planes, size), None)
        return self._sizes[size]


@not_compiled  # as find_neighbourhoods
def _with_neighbourhoods(planes: Tensor, labels: int, size: tuple[int, int]) -> "SizedMasks":
    def find() -> SizedMasks:
        sized = resize_nearest(planes.detach(), size)
        return SizedMasks(sized, find_neighbourhoods(sized, labels))

    return once(planes, (labels, size), find)


@dataclass(frozen=True)
class SizedMasks:
    """Masks at one size, with their neighbourhoods where that pays."""

    planes: Tensor
    neighbourhoods: Neighbourhoods | None
