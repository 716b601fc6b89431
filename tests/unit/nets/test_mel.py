"""Mel spectrograms."""

import math

import pytest
import torch

from nets.mel import SILENCE, Mel, filters

RATE, BANDS, WINDOW, HOP = 8000, 20, 256, 64


def sine(hertz: float, samples: int = 1024, rate: int = RATE) -> torch.Tensor:
    return torch.sin(2 * math.pi * hertz / rate * torch.arange(samples, dtype=torch.float64)).unsqueeze(0)


def test_there_is_a_frame_for_each_hop():
    for samples in (512, 1024, 64 * 33):
        assert Mel(RATE, BANDS, WINDOW, HOP)(torch.rand(2, samples)).shape == (2, BANDS, samples // HOP)
    assert Mel(RATE, 4, 16, 5)(torch.rand(1, 100)).shape == (1, 4, 20)  # a window that is not even beside the hop


def test_a_frame_is_the_log_of_the_filtered_transform_written_out():
    mel, wave = Mel(RATE, BANDS, WINDOW, HOP).double(), torch.rand(1, 1024, dtype=torch.float64) - 0.5
    found = mel(wave)[0, :, 7]
    start = 7 * HOP - (WINDOW - HOP) // 2
    time = torch.arange(WINDOW, dtype=torch.float64)
    frame = wave[0, start : start + WINDOW] * (0.5 - 0.5 * torch.cos(2 * math.pi * time / WINDOW))
    angles = 2 * math.pi * torch.arange(WINDOW // 2 + 1, dtype=torch.float64)[:, None] * time / WINDOW
    loudness = (((angles.cos() * frame).sum(1)) ** 2 + ((angles.sin() * frame).sum(1)) ** 2 + 1e-9).sqrt()
    torch.testing.assert_close(found, (mel.filters @ loudness).log(), rtol=1e-6, atol=1e-6)


def test_a_higher_pitch_is_in_a_higher_band():
    mel = Mel(RATE, BANDS, WINDOW, HOP)
    bands = [mel(sine(hertz))[0].mean(1).argmax().item() for hertz in (200, 400, 800, 1600, 3200)]
    assert bands == sorted(set(bands))
    assert bands[-1] >= BANDS - 4


def test_each_wide_band_has_area_one_and_the_scale_is_even_in_mels():
    found = filters(RATE, 10, 1024)
    areas = found.sum(1) * RATE / 1024
    torch.testing.assert_close(areas, torch.ones(10), rtol=0.02, atol=0)
    peaks = found.argmax(1) * RATE / 1024
    steps = (2595 * (1 + peaks / 700).log10()).diff()
    torch.testing.assert_close(steps, steps.mean().expand(9), rtol=0.05, atol=0)


def test_silence_has_a_value_and_a_slope():
    mel, wave = Mel(RATE, BANDS, WINDOW, HOP), torch.zeros(1, 512, requires_grad=True)
    found = mel(wave)
    assert found.min().item() >= math.log(SILENCE) - 1e-5
    found.sum().backward()
    assert wave.grad.isfinite().all()


def test_it_is_not_rounded_under_autocast_and_not_saved():
    mel, wave = Mel(RATE, BANDS, WINDOW, HOP), torch.rand(1, 512)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mel(wave), mel(wave.float()))
        assert mel(wave.bfloat16()).dtype == torch.float32
    assert not mel.state_dict()
    assert mel.double()(wave.double()).dtype == torch.float64


@pytest.mark.parametrize("rate", [8000, 22050])
def test_the_highest_band_ends_at_half_the_rate(rate):
    found = filters(rate, BANDS, 1024)
    assert found[-1, -2] > 0 and found[-1, -1] == 0
