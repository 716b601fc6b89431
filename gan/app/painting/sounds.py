"""Sounds: what they look like, and their WAV files."""

from collections.abc import Mapping
from math import log2
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from gan.files.disk import name_for, whole_file
from gan.sound import Sound
from nets.mel import Mel

BANDS, ZOOM = 40, 2  # bands of pitches, and pixels for each
FRAME = 0.032  # seconds that a column of pixels looks at
QUIET, LOUD = -9.0, 0.5  # the logs that are dark and bright
COLOURS = torch.tensor([[4, 4, 12], [72, 20, 108], [190, 55, 85], [250, 155, 50], [252, 250, 190]])


def spectrogram(sound: Sound) -> Image.Image:
    """The mel spectrogram of one sound: time goes to the right, pitch goes up, and loud is bright."""
    window = 2 ** round(log2(FRAME * sound.rate))
    wave = sound.samples.detach().cpu().float()
    (loudness,) = Mel(sound.rate, BANDS, window, window // 4)(wave.unsqueeze(0))
    pixels = _coloured((loudness - QUIET) / (LOUD - QUIET)).flip(0).repeat_interleave(ZOOM, 0)
    return Image.fromarray(pixels.numpy())


def _coloured(shares: Tensor) -> Tensor:
    """Shares of 0 to 1 as colours between those of COLOURS: bytes, with a last dimension of 3."""
    place = shares.clamp(0, 1) * (len(COLOURS) - 1)
    below = place.long().clamp_max(len(COLOURS) - 2)
    return torch.lerp(COLOURS[below].float(), COLOURS[below + 1].float(), (place - below).unsqueeze(-1)).byte()


def save(sound: Sound, path: Path) -> None:
    """Write a WAV file. Someone may be listening, so no half file is ever there."""
    with whole_file(path) as part:
        part.write_bytes(sound.wav())


def save_columns(columns: Mapping[str, Any], picture: Path) -> list[Path]:
    """Write each column of a grid that is a sound, beside the grid's picture; returns the files."""
    heard = {picture.with_name(f"{picture.stem}-{name_for(title)}.wav"): column for title, column in columns.items()}
    heard = {path: column for path, column in heard.items() if isinstance(column, Sound)}
    for path, column in heard.items():
        save(column, path)
    return list(heard)
