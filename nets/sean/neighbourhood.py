"""Which neighbourhoods of labels a mask has, so that what depends on them alone is computed once for each.

[Note: one row a neighbourhood]
Two convolutions 3x3 of a one-hot mask see the 5x5 labels around a pixel. Masks are made of regions: inside one all
neighbourhoods are the same, and the few kinds of border recur. A drawn face of 65,536 pixels has some 700 kinds of
3x3 and 2,900 of 5x5. So the first convolution is computed once a kind of 3x3, the second once a kind of 5x5 as a
sum of nine such rows, and pixels look their row up. Nothing is approximated: outside of the picture counts as one
more label. Codes differ from picture to picture, so the kinds of 5x5 are told apart by picture as well.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from nets.blocks import resize_nearest

CELLS = 9  # of a 3x3 neighbourhood
LIMIT = 2**63


class RowSums:
    """Sums of some rows of a table: a matrix of zeros and ones, by which tables are multiplied.

    `rows[i]` gets `entries[i]` added, a row of the table. Deterministic in both directions and differentiable as
    often as wanted, since the gradient is the same kind of sum.
    """

    def __init__(self, rows: Tensor, entries: Tensor, shape: tuple[int, int]) -> None:
        self.forward = _bags(rows, entries, shape[0])
        self.backward = _bags(entries, rows, shape[1])

    def __call__(self, table: Tensor) -> Tensor:
        """The sums, [shape[0], channels], of a table [shape[1], channels]."""
        return _Sum.apply(table, *self.forward, *self.backward)


def _bags(rows: Tensor, entries: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The entries row after row, and where each row begins and the last one ends."""
    ends = torch.bincount(rows, minlength=count).cumsum(0)
    return entries[torch.argsort(rows, stable=True)], F.pad(ends, (1, 0))


class _Sum(torch.autograd.Function):
    """embedding_bag, whose own gradient on a CPU is slow and not differentiable."""

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

    `pixels` [B,1,H*W] is each pixel's kind of 5x5 among the `kinds` rows that every picture has room for. `around`
    [kinds of 3x3, 9*planes] is the one-hot mask around. `mask` sums rows of a table with nine rows a kind of 3x3,
    `style` rows of one with nine rows a picture and label, both to the kinds of 5x5, picture after picture.
    """

    pixels: Tensor
    kinds: int
    around: Tensor
    mask: RowSums
    style: RowSums


@torch.compiler.disable  # how many there are depends on the data
def neighbourhoods(planes: Tensor, labels: int) -> Neighbourhoods | None:
    """The neighbourhoods of one-hot planes [B,labels,H,W], with one plane more if there are edges.

    None where telling them apart does not pay, with more kinds of 3x3 than half of the pixels, or where the planes
    are not one-hot.
    """
    pictures, _, height, width = planes.shape
    label = planes[:, :labels].argmax(1)
    if not _are_onehot(planes, labels):
        return None
    symbol, symbols = label, labels
    for edge in planes[:, labels:].unbind(1):
        symbol, symbols = symbol + symbols * edge.long(), 2 * symbols
    symbol = F.pad(symbol, (2, 2, 2, 2), value=symbols)

    # The kinds of 3x3 at every pixel and on a rim one pixel wide; then of 5x5, which the four corners' 3x3 cover.
    small, smalls = _kinds([(cell, symbols + 1) for cell in _cells(symbol)])
    pixels = pictures * height * width
    if 2 * smalls > pixels:
        return None
    picture = torch.arange(pictures, device=planes.device).view(-1, 1, 1).expand(-1, height, width)
    cells = _cells(small)
    large, larges = _kinds([(picture, pictures), *((cells[corner], smalls) for corner in (0, 2, 6, 8))])

    # Kinds are sorted by picture: number them in each by itself.
    example = _examples(large, larges)
    owner = picture.flatten()[example]
    counts = torch.bincount(owner, minlength=pictures)
    kinds = int(counts.max())
    first = counts.cumsum(0) - counts
    row = owner * kinds + torch.arange(larges, device=planes.device) - first[owner]

    # What each kind of 5x5 is made of, cell by cell; what lies outside of the picture adds nothing.
    def made_of(part: Tensor) -> Tensor:
        return torch.stack([cell.flatten()[example] for cell in _cells(part)], 1)

    inside = made_of(F.pad(torch.ones_like(label, dtype=torch.bool), (1, 1, 1, 1)))
    rows = row.unsqueeze(1).expand(-1, CELLS)[inside]
    cell = torch.arange(CELLS, device=planes.device)
    mask = (made_of(small) * CELLS + cell)[inside]
    style = (made_of(F.pad(picture * labels + label, (1, 1, 1, 1))) * CELLS + cell)[inside]

    # The one-hot mask around one pixel of each kind of 3x3.
    which, down, right = torch.unravel_index(_examples(small, smalls), small.shape)
    down, right = down.unsqueeze(1) + cell // 3, right.unsqueeze(1) + cell % 3
    around = F.pad(planes, (2, 2, 2, 2)).permute(0, 2, 3, 1)[which.unsqueeze(1), down, right]
    return Neighbourhoods(
        (large - first[picture]).view(pictures, 1, -1),
        kinds,
        around.flatten(1),
        RowSums(rows, mask, (pictures * kinds, smalls * CELLS)),
        RowSums(rows, style, (pictures * kinds, pictures * labels * CELLS)),
    )


def _are_onehot(planes: Tensor, labels: int) -> bool:
    """One label a pixel, and edges either there or not."""
    label, edges = planes[:, :labels], planes[:, labels:]
    ones = (label.amax(1) == 1) & (label.sum(1) == 1) & (label.square().sum(1) == 1)
    return bool(ones.all()) and bool(((edges == 0) | (edges == 1)).all())


def _cells(around: Tensor) -> list[Tensor]:
    """The nine neighbours of each pixel but those of a rim one pixel wide, row by row."""
    height, width = around.shape[-2] - 2, around.shape[-1] - 2
    return [around[..., y : y + height, x : x + width] for y in range(3) for x in range(3)]


def _kinds(parts: list[tuple[Tensor, int]]) -> tuple[Tensor, int]:
    """Number the distinct combinations of some numbers below some bounds, in their order, and count them."""
    total, bound = parts[0]
    for part, size in parts[1:]:
        if bound * size >= LIMIT:
            found, total = torch.unique(total, return_inverse=True)
            bound = len(found)
        total, bound = total * size + part, bound * size
    found, total = torch.unique(total, return_inverse=True)
    return total, len(found)


def _examples(kind: Tensor, kinds: int) -> Tensor:
    """A pixel of each kind, whichever."""
    pixels = torch.arange(kind.numel(), device=kind.device)
    return pixels.new_empty(kinds).scatter_(0, kind.flatten(), pixels)


class Regions:
    """A batch of masks at every size that a generator asks for, each prepared once.

    Neighbourhoods are told apart on a CPU only: a GPU convolves faster than it sorts.
    """

    def __init__(self, planes: Tensor, labels: int) -> None:
        self.planes, self.labels = planes, labels
        self._views: dict[tuple[int, int], View] = {}

    def at(self, size: tuple[int, int]) -> "View":
        """The masks at that size, by nearest."""
        if size not in self._views:
            planes = resize_nearest(self.planes, size)
            told_apart = planes.device.type == "cpu" and not planes.requires_grad
            self._views[size] = View(planes, neighbourhoods(planes, self.labels) if told_apart else None)
        return self._views[size]


@dataclass(frozen=True)
class View:
    """Masks at one size, with their neighbourhoods where that pays."""

    planes: Tensor
    neighbourhoods: Neighbourhoods | None
