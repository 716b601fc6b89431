"""Mel spectrograms: how loud each band of pitches is in each short frame of a sound; and distances of sounds."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SILENCE = 1e-5
PIECE = 1024  # frames of a long sound that are computed at a time; as published 12 seconds
RESOLUTIONS = (512, 50, 240), (1024, 120, 600), (2048, 240, 1200)  # of spectral_distance: FFT, hop, window


class Mel(nn.Module):
    """The log of a mel spectrogram: [B, bands, T / hop] of waves [B, T], as HiFi-GAN uses it (Kong et al. 2020).

    There are `bands` of equal width on the mel scale, from `bottom` to `top` Hz, by default to half the rate. A frame
    of `window` samples is taken every `hop` samples. It has nothing that learns and nothing that is saved.
    """

    filters: Tensor

    def __init__(
        self, rate: int, bands: int, window: int, hop: int, top: float | None = None, bottom: float = 0.0
    ) -> None:
        super().__init__()
        self.rate, self.bands, self.window, self.hop, self.top, self.bottom = rate, bands, window, hop, top, bottom
        self.register_buffer("filters", filters(rate, bands, window, top, bottom), persistent=False)

    def forward(self, wave: Tensor) -> Tensor:
        # In half precision the quiet parts would be lost.
        with torch.autocast(wave.device.type, enabled=False):
            spare = self.window - self.hop
            wave = F.pad(wave.to(self.filters).unsqueeze(1), (spare // 2, spare - spare // 2), "reflect").squeeze(1)
            # Some frames at a time: those of a long sound have many times as many numbers as the sound.
            last = wave.shape[-1] - self.window
            starts = range(0, last + 1, PIECE * self.hop)
            parts = [wave[:, start : min(last, start + (PIECE - 1) * self.hop) + self.window] for start in starts]
            heard = [self.filters @ loudness(part, self.window, self.hop) for part in parts]
            return torch.cat(heard, -1).clamp_min(SILENCE).log()


def loudness(wave: Tensor, window: int, hop: int, length: int | None = None, center: bool = False) -> Tensor:
    """How loud each frequency is in each frame: [B, length / 2 + 1, frames]; `length` is that of the transform."""
    frame = torch.hann_window(window, dtype=wave.dtype, device=wave.device)
    parts = torch.stft(
        wave, length or window, hop, window, frame, center=center, pad_mode="constant", return_complex=True
    )
    # The slope of a root at zero is infinite.
    return (parts.real.square() + parts.imag.square() + 1e-9).sqrt()


def filters(rate: int, bands: int, window: int, top: float | None = None, bottom: float = 0.0) -> Tensor:
    """The share that each frequency of a frame has in each band: [bands, window / 2 + 1].

    The bands are triangles that overlap by half, each of area 1 (Slaney 1998).
    """
    corners = _to_hertz(torch.linspace(_to_mels(bottom), _to_mels(top or rate / 2), bands + 2, dtype=torch.float64))
    frequencies = torch.arange(window // 2 + 1, dtype=torch.float64) * rate / window
    before, middle, after = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (frequencies - before) / (middle - before), (after - frequencies) / (after - middle)
    # The published basis is rounded here and in the end, as librosa rounds it.
    triangles = torch.minimum(rising, falling).clamp_min(0).float().double()
    return (triangles * 2 / (after - before)).float()


# Slaney's scale is straight below 1000 Hz and logarithmic above.
def _to_mels(hertz: float) -> float:
    return 3 * hertz / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)


def _to_hertz(mels: Tensor) -> Tensor:
    return torch.where(mels < 15, 200 * mels / 3, 1000 * 6.4 ** ((mels - 15) / 27))


def spectral_distance(made: Tensor, true: Tensor) -> Tensor:
    """How far waves [B, T] are from the true ones, in their spectrograms at three resolutions: [B]."""
    # Parallel WaveGAN, Yamamoto et al. 2020, equations 4 to 6: spectral convergence and the error of the logs.
    parts = []
    for length, hop, window in RESOLUTIONS:
        ours, theirs = (loudness(wave, window, hop, length, center=True) for wave in (made.float(), true.float()))
        norm = torch.linalg.vector_norm
        convergence = norm(ours - theirs, dim=(1, 2)) / norm(theirs, dim=(1, 2))
        parts += [convergence, (ours.log() - theirs.log()).abs().mean((1, 2))]
    return torch.stack(parts).sum(0) / len(RESOLUTIONS)
