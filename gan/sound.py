"""Sounds: what a game shows that is heard, and WAV files."""

import io
import wave
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

PAUSE = 0.25  # seconds of silence between two sounds of a file


@dataclass(frozen=True, eq=False)
class Sound:
    """A sound [T], or several sounds [B, T]: samples from -1 to 1, `rate` of them a second.

    A column that a game's `show` gives may be a Sound. Grids draw its spectrogram, and a WAV file is written beside.
    """

    samples: Tensor
    rate: int

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, which: int | slice) -> "Sound":
        return Sound(self.samples[which], self.rate)

    def __iter__(self) -> Iterator["Sound"]:
        return map(self.__getitem__, range(len(self)))

    @property
    def seconds(self) -> float:
        return self.samples.shape[-1] / self.rate

    def wav(self) -> bytes:
        """A WAV file of 16 bits a sample. Several sounds follow each other, with a pause between them."""
        pause = round(PAUSE * self.rate)
        several = self.samples.detach().cpu().float().reshape(-1, self.samples.shape[-1])
        line = F.pad(several, (0, pause)).flatten()[:-pause]
        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setnchannels(1)
            writer.setsampwidth(2)
            writer.setframerate(self.rate)
            writer.writeframes((line.clamp(-1, 1) * 32767).round().to(torch.int16).numpy().astype("<i2").tobytes())
        return file.getvalue()
