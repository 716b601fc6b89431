"""Runs on drawn sounds, in sizes for a small CPU: minutes and not days."""

from math import log2, prod

import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from gan.files.errors import UserError
from gan.runs.run import HELD_OUT, Run, Seed
from nets.hifigan import HifiGenerator, Judges, PeriodJudges, ScaleJudges
from nets.mel import Mel

STRIDES = 4, 4, 4
HOP = prod(STRIDES)
SCORES = {
    "val/mel_error": "mel error of held-out sounds",
    "val/spectral_error": "distance of spectrograms of held-out sounds",
}


def hifigan_tones(
    hertz: PositiveInt = 8000,
    segment: PositiveInt = 2048,
    seconds: PositiveFloat = 2.0,
    batch_size: PositiveInt = 8,
    max_steps: PositiveInt = 1000,
    seed: Seed = 0,
    workers: NonNegativeInt = 0,
    clips: PositiveInt = 1000,
    held_out: PositiveInt = 32,
    bands: PositiveInt = 40,
    width: PositiveInt = 128,
    rate: PositiveFloat = 1e-3,
    decay: PositiveFloat = 0.8,
) -> Run:
    """HiFi-GAN on drawn melodies: from a mel spectrogram to its sound.

    Args:
        hertz: Samples a second.
        segment: Samples of a sound to train on, a multiple of 64.
        seconds: Length of a held-out sound.
        batch_size: Sounds a step, of all ranks together.
        max_steps: Steps of the whole training.
        seed: Decides the sounds, the networks' first weights and the order of the samples.
        workers: Processes that prepare batches, for each rank.
        clips: How many sounds to train on.
        held_out: How many sounds to score on; none of them is trained on.
        bands: Bands of the mel spectrogram.
        width: Channels of the generator's first layer; published: 512.
        rate: Learning rate of all networks; published: 2e-4.
        decay: The learning rate is multiplied by it in every epoch; published: 0.999.
    """
    from datasets import GanData, Tones
    from gan.games.hifigan import HifiGan

    window = 2 ** round(log2(0.032 * hertz))  # samples of a frame of some 32 ms
    check_segment(segment, HOP, window)
    torch.manual_seed(seed)
    game = HifiGan(
        HifiGenerator(bands, width, STRIDES, [2 * each for each in STRIDES], dilations=((1, 3),) * 3),
        Judges(ScaleJudges(widths=(16, 16, 32, 64), strides=(4, 4, 4), groups=4), PeriodJudges(widths=(8, 16, 32, 64))),
        Mel(hertz, bands, window, HOP),
        rate=rate,
        decay=decay,
    )
    train = Tones(clips, segment, hertz, seed)
    frames = max(window // HOP, round(seconds * hertz / HOP))
    val = Tones(held_out, frames * HOP, hertz, seed, first=HELD_OUT)
    data = GanData(train, val, batch_size=batch_size, workers=workers, seed=seed, flip=False)
    return Run(game, data, max_steps, SCORES)


def check_segment(segment: int, hop: int, window: int) -> None:
    """Refuse parts of sounds that are shorter than a frame, or no whole number of hops."""
    if segment % hop or segment < window:
        fits = -(-max(segment, window) // hop) * hop
        raise UserError(f"segment={segment} is not a multiple of {hop} from {window} up; try segment={fits}")
