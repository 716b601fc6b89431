"""Drawn sounds."""

import pytest
import torch
from torch.nn import functional as F

from datasets import Tones
from gan.files.errors import UserError


def test_a_clip_is_the_same_in_every_set():
    one, other = Tones(8, 1024, seed=3), Tones(2, 1024, seed=3, first=5)
    for k in range(2):
        assert torch.equal(one[5 + k]["wave"], other[k]["wave"])
    assert torch.equal(one[-1]["wave"], one[7]["wave"])
    assert [other.clip(k) for k in range(2)] == [5, 6]
    assert len(one) == 8
    with pytest.raises(IndexError, match="outside of 2 clips"):
        other[2]


def test_clips_seeds_and_rates_differ():
    clips = [Tones(1, 2048, **settings)[0]["wave"] for settings in ({}, {"first": 1}, {"seed": 1}, {"rate": 16000})]
    for number, clip in enumerate(clips):
        assert clip.shape == (2048,) and clip.dtype == torch.float32
        assert all(not torch.allclose(clip, other, atol=0.1) for other in clips[:number])


def test_each_clip_is_as_loud_as_any_and_is_heard_throughout():
    for item in [Tones(40, 2048)[k] for k in range(40)]:
        assert item["wave"].abs().max().item() == pytest.approx(0.9)
        parts = item["wave"].view(8, 256).square().mean(1).sqrt()
        assert parts.min() > 5e-4  # the hiss


def test_a_note_has_its_pitch_and_harmonics():
    """What repeats after a period is loud in the autocorrelation there. Noise, the control, does not repeat."""

    def repeats(wave):
        wave = wave - wave.mean()
        spectrum = torch.fft.rfft(F.pad(wave, (0, len(wave))))
        likeness = torch.fft.irfft(spectrum.abs().square())[: len(wave) // 2]
        return (likeness[8:] / likeness[0]).max().item()

    tones, dice = Tones(1), torch.Generator().manual_seed(0)
    notes = [repeats(tones._note(dice)) for _ in range(12)]
    beats = [repeats(tones._beat(dice)) for _ in range(12)]
    assert min(notes) > 0.6 > max(beats)


def test_nothing_is_above_half_the_rate():
    """A harmonic that is too high would come back as another pitch."""
    tones, dice = Tones(1, rate=4000), torch.Generator().manual_seed(0)
    for _ in range(12):
        spectrum = torch.fft.rfft(tones._note(dice)).abs().square()
        assert spectrum[int(0.97 * len(spectrum)) :].sum() < 0.01 * spectrum.sum()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(length=0), "0 clips of 4096 samples are none; try 1000 clips"),
        (dict(length=1, samples=0), "1 clips of 0 samples are none; try 1000 clips of 4096 samples"),
        (dict(length=1, rate=2000), "need a rate of 4000 or more, not 2000"),
    ],
)
def test_what_cannot_be_drawn_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Tones(**settings)
