"""Kinds of neighbourhoods against a dictionary of what is around each pixel, and sums of rows."""

import gc
import weakref

import pytest
import torch
from torch.nn import functional as F

from nets.blocks import onehot
from nets.sean import neighbourhood
from nets.sean.neighbourhood import Masks, RowSums, find_neighbourhoods, once


def regions(labels: int, size: tuple[int, int] = (24, 20)):
    """Masks of square regions, some of one label, one pixel moved."""
    coarse = torch.randint(0, labels, (3, 4, 4), generator=torch.Generator().manual_seed(0))
    label = coarse.repeat_interleave(6, 1).repeat_interleave(6, 2)[:, : size[0], : size[1]].contiguous()
    label[0, 3, 3] = labels - 1
    return label


def planes(label: torch.Tensor, labels: int) -> torch.Tensor:
    return onehot(label, labels, torch.zeros((), dtype=torch.float64))


def around(label: torch.Tensor, reach: int) -> list[list[tuple[int, ...]]]:
    """What lies around each pixel of each picture, -1 outside of it."""
    windows = F.pad(label, (reach,) * 4, value=-1).unfold(1, 2 * reach + 1, 1).unfold(2, 2 * reach + 1, 1)
    return [[*map(tuple, picture.flatten(2).flatten(0, 1).tolist())] for picture in windows]


@pytest.mark.parametrize("labels", [2, 19, 183])
def test_pixels_share_a_row_when_and_only_when_all_around_them_is_the_same(labels):
    label = regions(labels)
    found = find_neighbourhoods(planes(label, labels), labels)
    for number, picture in enumerate(around(label, 2)):
        rows = dict(zip(found.pixels[number, 0].tolist(), picture, strict=True))
        assert len(set(rows.values())) == len(rows) <= found.kinds
        assert [rows[row] for row in found.pixels[number, 0].tolist()] == picture


def test_numbers_too_large_for_one_key_are_told_apart_all_the_same(monkeypatch):
    label = regions(5)
    plain = find_neighbourhoods(planes(label, 5), 5)
    monkeypatch.setattr(neighbourhood, "LIMIT", 10_000)
    assert torch.equal(find_neighbourhoods(planes(label, 5), 5).pixels, plain.pixels)


def test_random_labels_and_planes_that_are_not_onehot_are_left_to_the_convolution():
    mask, draw = planes(regions(4), 4), torch.Generator().manual_seed(0)
    assert find_neighbourhoods(mask, 4) is not None
    assert find_neighbourhoods(planes(torch.randint(0, 9, (1, 16, 16), generator=draw), 9), 9) is None
    assert find_neighbourhoods(torch.cat([mask, torch.full((3, 1, 24, 20), 0.5).double()], 1), 4) is None
    for pixel in ([2.0, -1, 0, 0], [0.0, 0, 0, 0], [0.5, 0, 0, 0], [2.0, 0, 0, 0]):
        mask[0, :, 3, 3] = torch.tensor(pixel)
        assert find_neighbourhoods(mask, 4) is None


def test_every_size_is_prepared_once_and_by_nearest():
    mask = planes(regions(4, (24, 24)), 4)
    every = Masks(mask, 4)
    assert every.at((12, 12)) is every.at((12, 12))
    assert torch.equal(every.at((12, 12)).planes, mask[:, :, ::2, ::2])
    assert every.at((24, 24)).planes.data_ptr() == mask.data_ptr()
    assert every.at((24, 24)).neighbourhoods is not None
    assert Masks(mask.clone().requires_grad_(), 4).at((24, 24)).neighbourhoods is None


def test_two_turns_with_the_same_planes_find_their_neighbourhoods_once(monkeypatch):
    found = []
    monkeypatch.setattr(neighbourhood, "find_neighbourhoods", lambda sized, _: found.append(sized.shape[-1]))
    mask = planes(regions(4, (24, 24)), 4)
    for _ in range(2):
        for size in (12, 24):
            Masks(mask, 4).at((size, size))
    assert found == [12, 24]
    Masks(mask.clone(), 4).at((24, 24))
    mask[0, :, 0, 0] = mask[0, :, 5, 5]
    Masks(mask, 4).at((24, 24))
    assert found == [12, 24, 24, 24]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_many_labels_are_told_apart_in_every_precision(dtype):
    label = torch.arange(1024).view(1, 32, 32)
    assert torch.equal(neighbourhood._labels(onehot(label, 1024, torch.zeros((), dtype=dtype))), label)


def test_row_sums_are_a_product_with_zeros_and_ones_in_any_order():
    draw = torch.Generator().manual_seed(0)
    matrix = (torch.rand(7, 5, generator=draw) < 0.4).double()
    matrix[2], matrix[:, 3] = 0, 0  # an empty row and an empty column
    rows, entries = matrix.nonzero(as_tuple=True)
    order = torch.randperm(len(rows), generator=draw)
    sums = RowSums(rows, entries, tuple(matrix.shape))
    table = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(sums(table), matrix @ table)
    torch.testing.assert_close(RowSums(rows[order], entries[order], (7, 5))(table), matrix @ table)
    assert torch.autograd.gradcheck(sums, table)
    assert torch.autograd.gradgradcheck(sums, table)


# ---- once ----


def test_it_dies_with_its_tensor():
    source = torch.zeros(3)
    made = weakref.ref(once(source, "a", set))
    gc.collect()
    assert made() is not None
    del source
    gc.collect()
    assert made() is None


def test_a_tensor_with_a_gradient_or_of_inference_mode_is_never_remembered():
    learned = torch.zeros(3, requires_grad=True)
    with torch.inference_mode():
        inferred = torch.zeros(3)
    for source in (learned, inferred):
        assert once(source, "a", set) is not once(source, "a", set)
