"""Mel spectrograms: how loud each band of pitches is in each short frame of a sound."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SILENCE = 1e-5


class Mel(nn.Module):
    """The log of a mel spectrogram: [B, bands, T / hop] of waves [B, T], as HiFi-GAN uses it (Kong et al. 2020).

    There are `bands` of equal width on the mel scale, from 0 Hz to half the rate. A frame of `window` samples is
    taken every `hop` samples. It has nothing that learns and nothing that is saved.
    """

    filters: Tensor
    frame: Tensor

    def __init__(self, rate: int, bands: int, window: int, hop: int) -> None:
        super().__init__()
        self.rate, self.bands, self.window, self.hop = rate, bands, window, hop
        self.register_buffer("filters", filters(rate, bands, window), persistent=False)
        self.register_buffer("frame", torch.hann_window(window), persistent=False)

    def forward(self, wave: Tensor) -> Tensor:
        # In half precision the quiet parts would be lost.
        with torch.autocast(wave.device.type, enabled=False):
            spare = self.window - self.hop
            wave = F.pad(wave.to(self.frame).unsqueeze(1), (spare // 2, spare - spare // 2), "reflect").squeeze(1)
            parts = torch.stft(wave, self.window, self.hop, window=self.frame, center=False, return_complex=True)
            # The slope of a root at zero is infinite.
            loudness = (parts.real.square() + parts.imag.square() + 1e-9).sqrt()
            return (self.filters @ loudness).clamp_min(SILENCE).log()


def filters(rate: int, bands: int, window: int) -> Tensor:
    """The share that each frequency of a frame has in each band: [bands, window / 2 + 1].

    The bands are triangles that overlap by half, each of area 1 (Slaney 1998).
    """
    # The mel scale of O'Shaughnessy 1987: m = 2595 log10(1 + f / 700).
    top = 2595 * torch.tensor(1 + rate / 2 / 700, dtype=torch.float64).log10()
    corners = 700 * (10 ** (torch.linspace(0, 1, bands + 2, dtype=torch.float64) * top / 2595) - 1)
    frequencies = torch.linspace(0, rate / 2, window // 2 + 1, dtype=torch.float64)
    low, middle, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (frequencies - low) / (middle - low), (high - frequencies) / (high - middle)
    return (torch.minimum(rising, falling).clamp_min(0) * 2 / (high - low)).float()
