"""Sounds: HiFi-GAN and mel spectrograms."""

import math

import pytest
import torch

from gan.files.errors import UserError
from nets.hifigan import HifiGenerator, PeriodJudge
from nets.mel import SILENCE, Mel, spectral_distance


def small(rates=(4,), kernels=(3,), twice=True) -> HifiGenerator:
    return HifiGenerator(6, 8, rates, [rate + 2 for rate in rates], kernels, ((1, 3),) * len(kernels), twice)


def test_a_width_that_cannot_be_halved_and_a_kernel_that_makes_another_length_are_refused():
    with pytest.raises(UserError, match="a width of 12 cannot be halved 3 times; try 8"):
        HifiGenerator(6, 12, (2, 2, 2), (4, 4, 4))
    for kernel in (2, 7):
        with pytest.raises(UserError, match=f"a kernel of {kernel} does not make a sound 4 times as long; try 6"):
            HifiGenerator(6, 8, (4,), (kernel,))


@pytest.mark.parametrize("twice", [True, False])
@pytest.mark.parametrize(("rates", "kernels"), [((4, 2), (3, 7)), ((5, 2), (5,)), ((3,), (3,))])
def test_a_wave_is_as_long_as_frames_times_rates_and_in_pieces_the_same(rates, kernels, twice):
    torch.manual_seed(0)
    net = small(rates, kernels, twice).double()
    for frames in (1, 16, 47, 48, 100):
        mel = torch.randn(1, 6, frames, dtype=torch.float64)
        with torch.no_grad():
            whole, pieces = net(mel), list(net.pieces(mel, 16))
        assert whole.shape == (1, frames * math.prod(rates)) and whole.abs().max() <= 1
        assert len(pieces) == -(-frames // 16)
        assert (torch.cat(pieces, -1) - whole).abs().max() < 1e-12
    net.reach //= 2  # it is not far enough
    with torch.no_grad():
        assert (torch.cat(list(net.pieces(mel, 16)), -1) - whole).abs().max() > 1e-9


@pytest.mark.parametrize("period", [2, 3, 5])
def test_a_judge_of_periods_sees_each_column_by_itself(period):
    judge, wave = PeriodJudge(period, (4, 8)), torch.rand(1, 100)
    other = wave.clone()
    other[0, 10 * period + 1] += 1.0  # in column 1
    before, after = judge(wave), judge(other)
    assert before[-1].shape == (1, 1, before[-1].shape[2], period)
    moved = (before[-1] - after[-1]).abs().amax((0, 1, 2)) > 0
    assert moved.tolist() == [column == 1 for column in range(period)]


# ---- mel ----


RATE, BANDS, WINDOW, HOP = 8000, 20, 256, 64


def test_a_long_sound_is_heard_in_parts(monkeypatch):
    for frames in (1, 7, 8, 9, 21):
        mel, wave = Mel(RATE, BANDS, 100, HOP).double(), torch.rand(2, HOP * frames + 5, dtype=torch.float64)
        whole = mel(wave)
        with monkeypatch.context() as patch:
            patch.setattr("nets.mel.PIECE", 4)
            assert (mel(wave) - whole).abs().max() < 1e-12


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


def test_the_spectral_distance_is_none_of_itself_and_grows_with_noise():
    wave = torch.sin(2 * math.pi / RATE * torch.tensor([[440.0], [880.0]]) * torch.arange(4096))
    noise = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    assert spectral_distance(wave, wave).tolist() == [0, 0]
    little, much = (spectral_distance(wave + size * noise, wave) for size in (1e-3, 1e-1))
    assert (little > 0).all() and (2 * little < much).all()
    silence = spectral_distance(torch.zeros_like(wave), wave)
    assert (silence > 1).all()  # all that is loud is missing: the spectral convergence alone is 1
    # Twice as loud everywhere: a spectral convergence of 1, as a share of the true sound, and an error of log 2.
    twice = torch.full((2,), 1 + math.log(2))
    torch.testing.assert_close(spectral_distance(2 * noise, noise), twice, rtol=0, atol=1e-3)
