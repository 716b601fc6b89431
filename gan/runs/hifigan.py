"""HiFi-GAN: in its published configurations on sounds of a person's own, and small on drawn ones."""

from collections.abc import Sequence
from math import log2, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from gan.files.errors import UserError
from gan.runs.run import HELD_OUT, Run, Seed, Share, begin_with, made_for, made_up, of_file, say
from nets.hifigan import HifiGenerator, Judges, PeriodJudges, ScaleJudges
from nets.mel import Mel

if TYPE_CHECKING:
    from datasets.augment import Samples
    from datasets.files.sounds import Sounds

SCALES, PERIODS = (128, 128, 256, 512, 1024), (32, 128, 512, 1024)  # channels of the published discriminators
STRIDES = 4, 4, 4  # of the generator for drawn sounds
HOP = prod(STRIDES)
SCORES = {
    "val/mel_error": "mel error of held-out sounds",
    "val/spectral_error": "distance of spectrograms of held-out sounds",
}


def hifigan(
    data: str = "data",
    config_: str | None = None,
    mels: str | None = None,
    hertz: PositiveInt | None = None,
    segment: PositiveInt | None = None,
    seconds: PositiveFloat = 2.0,
    batch_size: PositiveInt = 16,
    max_steps: PositiveInt = 2_500_000,
    width: PositiveFloat = 1.0,
    rate: PositiveFloat = 2e-4,
    decay: PositiveFloat = 0.999,
    held_out: Share = 0.02,
    seed: Seed = 0,
    workers: NonNegativeInt | None = None,
    skip_broken: bool = False,
    from_: str | None = None,
) -> Run:
    """HiFi-GAN on sounds of yours: from a mel spectrogram to its sound.

    Args:
        data: A folder of wav, flac, ogg or mp3 files, however deep.
        config_: V1, V2, V3 or a published config.json; default: that of --from, else V1.
        mels: A folder of mel spectrograms (.npy) of the same names, made by another network, to fine-tune on.
        hertz: Samples a second, to which other sounds are resampled; published: 22050.
        segment: Samples of a sound to train on; published: 8192.
        seconds: How much of a held-out sound is scored on, from its beginning.
        batch_size: Sounds a step, of all ranks together; published: 16.
        max_steps: Steps of the whole training; published: 2,500,000.
        width: Channels of all networks are this times the published ones; a config.json says those of the generator.
        rate: Learning rate of all networks; published: 2e-4.
        decay: The learning rate is multiplied by it in every epoch; published: 0.999.
        held_out: The share of the sounds that is scored on and not trained on; their names decide which.
        seed: Decides the networks' first weights, the order of the sounds and their parts.
        workers: Processes that prepare batches, for each rank; default: as many as it has CPUs, 4 at most.
        skip_broken: Leave sounds out that cannot be read, or are too short.
        from_: A published file (g_02500000), a folder of them, or a run, to begin with its weights.
    """
    from datasets import GanData
    from gan.games.hifigan import HifiGan
    from nets.published.hifigan import CONFIGS, networks

    config, where = _configuration(config_, from_)
    if hertz is not None:
        top = config.get("fmax")
        config |= {"sampling_rate": hertz, "fmax": top if top and top < hertz / 2 else None}
    torch.manual_seed(seed)
    generator, mel = networks(config, where, width if where in CONFIGS else 1.0)
    judges = Judges(ScaleJudges(widths=_widths(SCALES, width)), PeriodJudges(widths=_widths(PERIODS, width)))
    segment = segment or max(mel.window, int(config.get("segment_size", 32 * mel.hop)) // mel.hop * mel.hop)
    check_segment(segment, mel.hop, mel.window)
    game = HifiGan(generator, judges, mel, rate=rate, decay=decay, segment=segment, batch=batch_size)
    begin_with(from_, game)
    length = max(segment, round(seconds * mel.rate / mel.hop) * mel.hop)
    how = mel.rate, segment, mel.window, skip_broken, mels, mel.bands, mel.hop
    train, val = _sounds(data, how, held_out, length)
    sounds = GanData(train, val if len(val) else None, batch_size=batch_size, workers=workers, seed=seed, flip=False)
    said = dict(config_=Path(where).name, hertz=mel.rate, segment=segment, width=width, rate=rate, decay=decay)
    chosen = {name: str(value) for name, value in (said | {"batch_size": batch_size}).items()}
    return Run(game, sounds, max_steps, SCORES if len(val) else {}, chosen=chosen)


def _sounds(data: str, how: tuple[Any, ...], held_out: float, length: int) -> tuple["Samples", "Samples"]:
    """To train on, and held out. A plan takes tones where the folder is not there yet."""
    from datasets import Tones
    from datasets.files.sounds import Sounds

    try:
        found = Sounds(data, *how)
        train, val = found.split(held_out)
        val.length = length
        say(_said(data, found, train, val))
    except UserError as error:
        if not made_for("plan"):
            return made_up(error)
        if Path(data).exists():
            raise
        return Tones(1000, how[1], how[0]), Tones(16, length, how[0])
    return train, val


def _widths(published: Sequence[int], width: float) -> list[int]:
    return [max(16, int(each * width) // 16 * 16) for each in published]


def _configuration(typed: str | None, from_: str | None) -> tuple[dict[str, Any], str]:
    """The published configuration, and what it is called in messages."""
    from nets.published.hifigan import CONFIG, CONFIGS, read_config

    if typed in CONFIGS or typed is from_ is None:
        return dict(CONFIGS[typed or "V1"]), typed or "V1"
    path = Path(typed or from_ or "").expanduser()
    if typed is None:
        path = (path if path.is_dir() else path.parent) / CONFIG

    def read() -> dict[str, Any]:
        if typed is not None and not path.is_file():
            raise UserError(
                f"--config {typed} is not known; type one of {', '.join(CONFIGS)}, or a config.json of HiFi-GAN"
            )
        return read_config(path) if path.exists() else CONFIGS["V1"]

    return of_file(read), str(path)


def _said(data: str, found: "Sounds", train: "Sounds", val: "Sounds") -> str:
    minutes = sum(found.lengths) / found.rate / 60
    notes = [f"data {data}: {len(found):,} sounds, {minutes:.1f} minutes at {found.rate:,} Hz"]
    notes += [f"{len(train):,} to train on and {len(val):,} held out"]
    notes += [f"{len(found.problems):,} broken or too short left out"] if found.problems else []
    notes += [f"not sounds: {found.source.note}"] if found.source.note else []
    room = 2 * sum(found.lengths)  # 16 bits
    return "; ".join([*notes, f"decoded into {found.folder.parent}, {-(-room // 10**6):,} MB"])


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
    generator = HifiGenerator(bands, width, STRIDES, [2 * each for each in STRIDES], dilations=((1, 3),) * 3)
    scales = ScaleJudges(widths=(16, 16, 32, 64), strides=(4, 4, 4), groups=4)
    judges = Judges(scales, PeriodJudges(widths=(8, 16, 32, 64)))
    game = HifiGan(generator, judges, Mel(hertz, bands, window, HOP), rate=rate, decay=decay)
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
