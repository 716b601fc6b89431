"""Sounds drawn from a seed: short melodies with a beat, and nothing to download."""

import math

import torch
from torch import Generator, Tensor
from torch.utils.data import Dataset

from gan.files.errors import UserError
from gan.noise import seed_for

SCALE = (0, 2, 4, 7, 9)  # semitones above the key, in each of three octaves
LOWEST = 110.0  # Hz
HARMONICS = 12
LONGEST = 0.6  # seconds of a note
MOST = 10**9  # clips of a set: the order of an epoch is an array
NOTES, BEATS = 4, 2  # a second
HISS = 1e-3  # no recording is quite silent


class Tones(Dataset):
    """Clips number `first` to `first + length - 1` of a seed, as {"wave": [samples]} between -1 and 1.

    Clip k of a seed is the same in every data set of this number of samples and this rate. All clips of a seed are in
    one key. A clip is cut out of music that goes on: its first notes have begun before it.
    """

    def __init__(self, length: int, samples: int = 4096, rate: int = 8000, seed: int = 0, first: int = 0) -> None:
        if min(length, samples) < 1 or length > MOST:
            raise UserError(f"there are no {length} clips of {samples} samples; try 1000 clips of 4096 samples")
        if rate < 4000:
            raise UserError(f"notes of up to 1 kHz and their harmonics need a rate of 4000 or more, not {rate}")
        self.length, self.samples, self.rate, self.seed, self.first = length, samples, rate, seed, first
        self.key = seed_for("key", seed) % 12

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"wave": self.draw(self.clip(index))}

    def clip(self, index: int) -> int:
        if not -self.length <= index < self.length:
            raise IndexError(f"index {index} is outside of {self.length} clips")
        return self.first + index % self.length

    def draw(self, clip: int) -> Tensor:
        """The samples of a clip; its loudest one is 0.9."""
        dice = Generator().manual_seed(seed_for("tones", self.seed, clip))
        before = round(LONGEST * self.rate)
        music = torch.zeros(before + self.samples, dtype=torch.float64)
        for rate, play in ((NOTES, self._note), (BEATS, self._beat)):
            for start in torch.randint(len(music), (max(1, round(rate * len(music) / self.rate)),), generator=dice):
                sound = play(dice)[: len(music) - start]
                music[start : start + len(sound)] += sound
        heard = music[before:] + HISS * torch.randn(self.samples, generator=dice, dtype=torch.float64)
        return (0.9 * heard / heard.abs().max().clamp_min(1e-6)).float()

    def _note(self, dice: Generator) -> Tensor:
        """Harmonics that swell, glide or tremble, and fade: high ones sooner than low ones."""
        length, loudness, attack, glide, trembling, dullness, evens = torch.rand(7, generator=dice).tolist()
        length = 0.15 + (LONGEST - 0.15) * length
        time = torch.arange(int(length * self.rate), dtype=torch.float64) / self.rate
        octave, degree = (int(torch.randint(high, (), generator=dice)) for high in (3, len(SCALE)))
        semitones = self.key / 2 + 12 * octave + SCALE[degree]
        bend = torch.zeros_like(time)  # in semitones
        if glide < 0.2:
            bend += (12 * glide - 1.2) * time / length
        if trembling < 0.2:
            bend += 2 * trembling * torch.sin(2 * math.pi * (4 + 16 * trembling) * time)
        frequency = LOWEST * 2 ** ((semitones + bend) / 12)
        phase = (2 * math.pi / self.rate) * frequency.cumsum(0)

        note = torch.zeros_like(time)
        for harmonic in range(1, HARMONICS + 1):
            if harmonic * frequency.max() > 0.45 * self.rate:
                break
            strength = harmonic ** -(0.7 + 1.5 * dullness) * (evens if harmonic % 2 == 0 else 1.0)
            note += strength * torch.exp(-(1 + dullness * harmonic) * 2 * time) * torch.sin(harmonic * phase)
        swell = (time / (0.005 + 0.06 * attack)).clamp_max(1.0)
        end = ((length - time) / 0.03).clamp_max(1.0)
        return (0.3 + 0.7 * loudness) * swell * end * note

    def _beat(self, dice: Generator) -> Tensor:
        """A burst of noise, dull like a drum or sharp like a cymbal."""
        loudness, fade, sharp = torch.rand(3, generator=dice).tolist()
        fade = 0.01 + 0.05 * fade
        time = torch.arange(int(6 * fade * self.rate), dtype=torch.float64) / self.rate
        noise = torch.randn(len(time) + 1, generator=dice, dtype=torch.float64)
        noise = (noise[1:] - noise[:-1]) / 2 if sharp > 0.5 else (noise[1:] + noise[:-1]) / 2
        return (0.2 + 0.5 * loudness) * torch.exp(-time / fade) * noise
