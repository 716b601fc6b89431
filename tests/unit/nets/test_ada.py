"""Adaptive augmentation: what it does to a picture, to whom, and how its probability moves."""

from itertools import pairwise

import pytest
import torch

from gan import noise
from nets.ada import Ada, moved


@pytest.fixture
def pictures():
    torch.manual_seed(0)
    return torch.rand(8, 3, 8, 8, dtype=torch.float64) * 2 - 1


def at(probability, **settings):
    ada = Ada(**settings)
    ada.p.fill_(probability)
    return ada


def placed(ada, pictures, first=0):
    with noise.at(noise.Place(("test",), first, len(pictures), 8)):
        return ada(pictures)


def test_at_probability_zero_it_changes_nothing(pictures):
    torch.testing.assert_close(Ada()(pictures), pictures)


@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
def test_turns_are_those_of_torch(quarters, pictures):
    still = torch.zeros(8)
    turns = torch.full((8,), quarters)
    turned = moved(pictures, turns, still.bool(), still, still)
    assert any(torch.equal(turned, torch.rot90(pictures, sign * quarters, (2, 3))) for sign in (1, -1))
    mirrored = moved(pictures, turns, still.bool().logical_not(), still, still)
    assert torch.equal(mirrored, turned.flip(3))


def test_shifts_are_of_whole_pixels_and_reflect_the_border(pictures):
    still = torch.zeros(8)
    shifted = moved(pictures, still, still.bool(), still + 0.125, still - 0.25)
    assert torch.equal(shifted[:, :, 1:, :-2], pictures[:, :, :-1, 2:])
    assert torch.equal(shifted[:, :, 0, :-2], pictures[:, :, 1, 2:])
    assert torch.equal(shifted[:, :, 1:, -1], pictures[:, :, :-1, 5])


def test_every_picture_is_changed_by_draws_of_its_own(pictures):
    same = pictures[:1].expand(8, -1, -1, -1)
    changed = placed(at(1.0), same)
    assert all(not torch.allclose(one, other) for one, other in pairwise(changed))


def test_draws_follow_the_sample(pictures):
    whole = placed(at(0.7), pictures)
    halves = placed(at(0.7), pictures[:4]), placed(at(0.7), pictures[4:], first=4)
    torch.testing.assert_close(torch.cat(halves), whole, rtol=0, atol=1e-15)


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_it_leaves_as_many_pictures_alone_as_it_says(probability):
    torch.manual_seed(0)
    pictures = torch.rand(4000, 3, 8, 8, dtype=torch.float64)
    kept = (at(probability)(pictures) - pictures).abs().amax((1, 2, 3)) < 1e-9
    # Half of the mirrored and a quarter of the turned stay as they are, and of shifts those of less than half a pixel.
    half = 0.5 / 8 / 0.125  # the share of shifts along one side that round to nothing
    alone = (1 - probability / 2) * (1 - 3 / 4 * probability) * (1 - probability * (1 - half**2))
    expected = alone * (1 - probability) ** 3
    assert kept.double().mean().item() == pytest.approx(expected, abs=0.02)


def test_it_can_be_differentiated_twice(pictures):
    small = pictures[:2, :, :4, :4].clone().requires_grad_()

    def changed(x):
        return placed(at(0.9), x).square()

    assert torch.autograd.gradcheck(changed, small)
    assert torch.autograd.gradgradcheck(changed, small)


def test_the_probability_moves_by_the_number_of_pictures_and_stays_in_its_range():
    ada = Ada(target=0.6, images=64)
    steps = [(16, 16), (13, 16), (12, 16), (16, 16), (16, 16), (16, 16), (16, 16)]  # the mean signs 1, 0.625, 0.5, 1
    found = []
    for positive, count in steps:
        ada.adjust(torch.tensor(positive), torch.tensor(count))
        found.append(ada.p.item())
    assert found == [0.25, 0.5, 0.25, 0.5, 0.75, 1.0, 1.0]
    for _ in range(5):
        ada.adjust(torch.tensor(0), torch.tensor(16))
    assert ada.p == 0


def test_the_probability_is_saved():
    assert "p" in Ada().state_dict()
