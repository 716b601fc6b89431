"""Kinds of neighbourhoods: which are hard to tell apart, and which are left to the convolution."""

import pytest
import torch

from nets.blocks import onehot
from nets.sean import neighbourhood
from nets.sean.neighbourhood import find_neighbourhoods


def regions(labels: int, size: tuple[int, int] = (24, 20)):
    """Masks of square regions, some of one label, one pixel moved."""
    coarse = torch.randint(0, labels, (3, 4, 4), generator=torch.Generator().manual_seed(0))
    label = coarse.repeat_interleave(6, 1).repeat_interleave(6, 2)[:, : size[0], : size[1]].contiguous()
    label[0, 3, 3] = labels - 1
    return label


def planes(label: torch.Tensor, labels: int) -> torch.Tensor:
    return onehot(label, labels, torch.zeros((), dtype=torch.float64))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_many_labels_are_told_apart_in_every_precision(dtype):
    label = torch.arange(1024).view(1, 32, 32)
    assert torch.equal(neighbourhood._labels(onehot(label, 1024, torch.zeros((), dtype=dtype))), label)
