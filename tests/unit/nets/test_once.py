"""What views and draws of a forward are computed once."""

import gc
import math
import weakref

import pytest
import torch

from gan import noise
from nets import byol
from nets.sean.neighbourhood import once

# ---- once ----


class Made:
    """Something that can be asked whether it still lives."""


def test_it_dies_with_its_tensor():
    source = torch.zeros(3)
    made = weakref.ref(once(source, "a", Made))
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
        assert once(source, "a", Made) is not once(source, "a", Made)


# ---- views ----


def pictures(count: int = 64, size: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, size, size, generator=generator, dtype=torch.float64) * 2 - 1


def at(first: int, rows: int, total: int = 64):
    return noise.at(noise.Place(("test",), first, rows, total))


def test_a_sample_has_the_same_view_on_any_rank():
    given = pictures()
    with at(0, 64):
        whole = byol.random_view(given)
    halves = []
    for first in (0, 32):
        with at(first, 32):
            halves.append(byol.random_view(given[first : first + 32]))
    assert torch.equal(torch.cat(halves), whole)
    assert not torch.equal(whole[:32], whole[32:])


def test_two_views_differ_and_stay_in_range():
    given = pictures()
    with at(0, 64):
        one, other = byol.random_view(given), byol.random_view(given)
    assert one.shape == other.shape == given.shape
    assert (one - other).flatten(1).abs().amax(1).min() > 0.01
    assert one.min() >= -1 and one.max() <= 1


def test_a_part_is_a_window_of_the_picture_that_may_be_mirrored():
    """A picture of its own coordinates tells where the part was."""
    size = 64
    row = (torch.arange(size, dtype=torch.float64) + 0.5) / size * 2 - 1
    given = torch.stack([row.expand(size, size), row[:, None].expand(size, size), torch.zeros(size, size)])
    with at(0, 200, 200):
        found = byol.cropped(given.expand(200, -1, -1, -1))
    across, down = found[:, 0, :, 1:-1].mean(1), found[:, 1, 1:-1].mean(2)
    steps = [each.diff(dim=1) for each in (across, down)]
    for each in steps:
        torch.testing.assert_close(each, each[:, :1].expand_as(each))  # evenly enlarged
    width, height = (each[:, 0] * size / 2 for each in steps)
    assert 0.35 < (width < 0).double().mean() < 0.65
    assert (height > 0).all()
    area = width.abs() * height
    assert byol.SMALLEST - 0.01 < area.min() < byol.SMALLEST + 0.1 and 0.9 < area.max() <= 1 + 1e-9


def test_colours_change_in_most_views_and_some_are_grey():
    given = pictures(400, 2).clamp(-0.5, 0.5)
    with at(0, 400, 400):
        found = byol.recoloured(given)
    same = (found - given).abs().flatten(1).amax(1) < 1e-9
    grey = (found - found.mean(1, keepdim=True)).abs().flatten(1).amax(1) < 1e-9
    assert same.double().mean() == pytest.approx((1 - byol.JITTER) * (1 - byol.GREY), abs=0.06)
    assert grey.double().mean() == pytest.approx(byol.GREY, abs=0.06)


def test_a_turned_hue_keeps_the_grey_and_a_third_turn_exchanges_the_colours():
    colours = pictures(4, 2)
    colours = colours - colours.mean(1, keepdim=True)
    third = byol.turned(colours, torch.tensor(2 * math.pi / 3))
    torch.testing.assert_close(third, colours.roll(1, 1))
    torch.testing.assert_close(byol.turned(colours, torch.tensor(0.3)).mean(1), torch.zeros(4, 2, 2).double())
