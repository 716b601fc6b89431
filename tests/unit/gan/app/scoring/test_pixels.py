"""Scores of pictures against their truth, compared with figures computed by hand."""

import math

import pytest
import torch

from gan.app.scoring import pixels


def flat(value, size=16):
    """A picture of one value in 0..1, scaled as the networks' pictures are."""
    return torch.full((1, 3, size, size), 2.0 * value - 1)


def random(count, seed=0):
    return torch.rand(count, 3, 16, 20, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_equal_pictures_have_nothing_to_tell_apart():
    picture = random(2)
    assert {name: value.tolist() for name, value in pixels.ssim(picture, picture).items()} == {
        "ssim": pytest.approx([1, 1], abs=1e-6),
        "ssim_range_2": pytest.approx([1, 1], abs=1e-6),
    }
    assert pixels.rmse(picture, picture).tolist() == [0, 0]
    assert pixels.psnr(picture, picture).tolist() == [math.inf, math.inf]


@pytest.mark.parametrize(("name", "data_range"), [("ssim", 1), ("ssim_range_2", 2)])
def test_ssim_of_flat_pictures_is_the_quotient_of_their_means(name, data_range):
    constant = (0.01 * data_range) ** 2
    expected = (2 * 0.1 * 0.2 + constant) / (0.1**2 + 0.2**2 + constant)
    assert pixels.ssim(flat(0.1), flat(0.2))[name].item() == pytest.approx(expected, rel=1e-4)


def test_a_data_range_of_2_flatters():
    made, truth = random(1), random(1, seed=1)
    scores = pixels.ssim(made, truth)
    assert scores["ssim_range_2"] > scores["ssim"] + 0.01


def test_rmse_and_psnr_by_hand():
    assert pixels.rmse(flat(0.25), flat(0.75)).item() == pytest.approx(0.5)
    assert pixels.psnr(flat(0.25), flat(0.75)).item() == pytest.approx(-20 * math.log10(0.5))


def test_values_outside_are_clipped_as_when_they_are_saved():
    assert pixels.rmse(flat(1.5), flat(1.0)).item() == 0
    assert pixels.ssim(flat(-0.3), flat(0.0))["ssim"].item() == pytest.approx(1)


def test_each_picture_has_a_number_of_its_own():
    made, truth = random(3), random(3, seed=1)
    for score in (pixels.rmse, pixels.psnr, lambda *both: pixels.ssim(*both)["ssim"]):
        alone = torch.cat([score(made[k : k + 1], truth[k : k + 1]) for k in range(3)])
        assert len(set(alone.tolist())) == 3
        torch.testing.assert_close(score(made, truth), alone, rtol=1e-6, atol=0)


def test_the_masked_error_is_a_sum_over_known_pixels_and_their_number():
    known = torch.zeros(1, 16, 16)
    known[0, 2:4, 5:8] = 1
    made = flat(0.5)
    made[..., 10:, :] = 1  # where nothing is known
    assert pixels.masked_error(made, flat(0.75), known).tolist() == [[pytest.approx(0.25 * 6), 6]]


def test_the_error_and_the_spill_of_one_region_by_hand():
    region = torch.zeros(2, 16, 16, dtype=torch.bool)
    region[:, :4] = True
    before, after = flat(0.5).repeat(2, 1, 1, 1), flat(0.5).repeat(2, 1, 1, 1)
    after[:, :, :4] += 0.4  # 0.2 of 0..1
    after[1, :, 4:] -= 0.1
    truth = flat(0.8).repeat(2, 1, 1, 1)
    assert pixels.region_error(after, truth, region).tolist() == pytest.approx([0.1, 0.1])
    assert pixels.region_spill(after, before, region).tolist() == pytest.approx([0, 0.25])
    assert pixels.region_spill(before, before, region).tolist() == [0, 0]
