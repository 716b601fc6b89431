"""Sounds and their files."""

import io
import wave

import numpy as np
import pytest
import torch

from gan.sound import PAUSE, Sound


def read(data: bytes) -> tuple[int, np.ndarray]:
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        return file.getframerate(), np.frombuffer(file.readframes(file.getnframes()), "<i2")


def test_a_file_has_the_samples_and_the_rate():
    rate, found = read(Sound(torch.tensor([0.0, 1.0, -1.0, 0.5, 7.0], dtype=torch.float64), 16000).wav())
    assert rate == 16000
    assert found.tolist() == [0, 32767, -32767, 16384, 32767]


def test_several_sounds_follow_each_other_after_a_pause():
    _, found = read(Sound(torch.ones(3, 100, requires_grad=True), 1000).wav())
    pause = round(PAUSE * 1000)
    assert len(found) == 3 * 100 + 2 * pause
    loud = (found > 0).astype(int)
    assert loud.sum() == 300
    assert np.flatnonzero(np.diff(loud)).tolist() == [99, 99 + pause, 199 + pause, 199 + 2 * pause]


def test_it_is_a_sequence_of_sounds():
    several = Sound(torch.rand(3, 100), 1000)
    assert len(several) == len(list(several)) == 3
    assert torch.equal(several[1].samples, several.samples[1])
    assert several[:2].samples.shape == (2, 100) and several[:2].rate == 1000
    assert several.seconds == several[0].seconds == pytest.approx(0.1)
