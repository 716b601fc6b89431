"""HiFi-GAN in its published configurations, on sounds of a person's own."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from gan.files.errors import UserError
from gan.runs.run import Run, Seed, Share, begin_with, is_planned, of_file, say
from gan.runs.tones import SCORES, check_segment
from nets.hifigan import Judges, PeriodJudges, ScaleJudges

if TYPE_CHECKING:
    from datasets.augment import Samples
    from datasets.files.sounds import Sounds

SCALES, PERIODS = (128, 128, 256, 512, 1024), (32, 128, 512, 1024)  # channels of the published discriminators


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
        from_: A published file (g_02500000) or a folder of them, to begin with its weights.
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
    game = HifiGan(generator, judges, mel, rate=rate, decay=decay)
    begin_with(from_, game)

    segment = segment or max(mel.window, int(config.get("segment_size", 32 * mel.hop)) // mel.hop * mel.hop)
    check_segment(segment, mel.hop, mel.window)
    length = max(segment, round(seconds * mel.rate / mel.hop) * mel.hop)
    how = mel.rate, segment, mel.window, skip_broken, mels, mel.bands, mel.hop
    train, val = _sounds(data, how, held_out, length)
    scored = val if len(val) else None
    rules: dict[str, Any] = dict(batch_size=batch_size, workers=workers, seed=seed, flip=False)
    return Run(game, GanData(train, scored, **rules), max_steps, SCORES if scored else {})


def _widths(published: Sequence[int], width: float) -> list[int]:
    return [max(16, int(each * width) // 16 * 16) for each in published]


def _sounds(data: str, how: tuple[Any, ...], held_out: float, length: int) -> tuple["Samples", "Samples"]:
    """To train on, and held out. A plan takes tones where the folder is not there yet."""
    from datasets import Tones
    from datasets.files.sounds import Sounds

    rate, segment = how[:2]
    try:
        found = Sounds(data, *how)
        train, val = found.pieces(held_out, length)
        say(_said(data, found, train, val))
    except UserError:
        if not is_planned() or Path(data).exists():
            raise
        return Tones(1000, segment, rate), Tones(16, length, rate)
    return train, val


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
    """What was found and decided, in one line."""
    minutes = sum(found.lengths) / found.rate / 60
    notes = [f"data {data}: {len(found):,} sounds, {minutes:.1f} minutes at {found.rate:,} Hz"]
    notes += [f"{len(train):,} to train on and {len(val):,} held out"]
    notes += [f"{len(found.problems):,} broken or too short left out"] if found.problems else []
    return "; ".join([*notes, *([f"not sounds: {found.source.note}"] if found.source.note else [])])
