"""`gan.sample RUN --inputs`: every file of a folder, translated by a run's network.

Of pictures it makes pictures of their sizes; of sounds and mel spectrograms, WAV files.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from datasets.files.cache import listed
from datasets.files.decoding import SUFFIXES, Frame
from datasets.files.find import find_source
from datasets.files.sounds import PEAK, SoundFolder, read_mel
from datasets.files.sources import Source
from gan.app.outputs import say
from gan.app.painting import grids
from gan.app.painting.sheet import into, writing
from gan.files.errors import UserError, printable, reason
from gan.games.hifigan import HifiGan
from gan.games.translation import Translation
from gan.sound import Sound
from strategies import random_state


def way(game: Any, title: str, direction: str | None) -> Translation:
    """The game's translation of that name; without a name its first one."""
    known = game.translations() if hasattr(game, "translations") else {}
    if not known:
        raise UserError(f"{title}: its game translates no pictures, so --inputs does nothing; type show")
    if direction is not None and direction not in known:
        raise UserError(f"{title} has no direction {direction}; known: {', '.join(known)}")
    return known[direction or next(iter(known))]


def translate_folder(chosen: Translation, inputs: str, out: Path, largest: int | None, device: torch.device) -> Path:
    """Write each picture's translation as a PNG of the same name and size. What cannot be read is said at the end."""
    source, rows = _pictures(inputs)

    def read(row: int) -> Tensor:
        with source.opened(row) as picture:
            return _pixels(picture, chosen.channels, largest)

    def make(pixels: Tensor) -> bytes:
        return grids.png(grids.picture(translated(chosen, pixels[None].to(device))[0], transparent=True))

    return write_all(source, rows, out, ".png", read, make)


def write_all(
    source: Source,
    rows: list[int],
    out: Path,
    ending: str,
    read: Callable[[int], Tensor],
    make: Callable[[Tensor], bytes],
) -> Path:
    """Write what is made of each file, under its name with another ending. What cannot be read is said at the end."""
    names, problems = _names([os.fsdecode(source.names[row]) for row in rows], ending), []
    with writing(out), into(out) as write, tqdm(rows, desc="translating", unit="file") as bar:
        for row, name in zip(bar, names, strict=True):
            try:
                found = read(row)
            except UserError as error:
                problems.append(str(error))
                continue
            write(name, make(found))
    if len(problems) == len(rows):
        raise UserError(listed(f"no {source.what.removesuffix('s')} in {source.path} can be read:", problems))
    if problems:
        title = f"{len(problems)} of {len(rows)} {source.what} in {source.path} were left out:"
        say(printable(listed(title, problems)))
    return out


@torch.no_grad()
def translated(chosen: Translation, pictures: Tensor, seed: int = 0) -> Tensor:
    """Translations of pictures from -1 to 1, of their size: they are padded to what the network takes, and cut back."""
    height, width = pictures.shape[2:]
    bottom, right = -height % chosen.multiple, -width % chosen.multiple
    if bottom or right:
        mode = "reflect" if bottom < height and right < width else "replicate"
        pictures = F.pad(pictures, (0, right, 0, bottom), mode)
    with random_state.untouched():
        random_state.reseed(seed)  # so that dropout is the same for a picture each time
        return chosen.paint(pictures)[..., :height, :width]


def _pictures(inputs: str) -> tuple[Source, list[int]]:
    path = Path(inputs).expanduser()
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        source = find_source(str(path.parent), classes=False)
        return source, [row for row in range(len(source)) if os.fsdecode(source.names[row]) == path.name]
    source = find_source(inputs, classes=False)
    return source, list(range(len(source)))


def _names(names: list[str], ending: str) -> Iterator[str]:
    """The names with that ending; where only the endings differ, behind the whole name."""
    plain = [str(PurePosixPath(name).with_suffix(ending)) for name in names]
    count = Counter(plain)
    return (each if count[each] == 1 else f"{name}{ending}" for name, each in zip(names, plain, strict=True))


def _pixels(picture: Image.Image, channels: int, largest: int | None) -> Tensor:
    picture = ImageOps.exif_transpose(picture)
    scale = min(1.0, (largest or max(picture.size)) / max(picture.size))
    width, height = (max(1, round(side * scale)) for side in picture.size)
    return Frame(height, width, channels).pixels(picture).float() / 127.5 - 1


class SoundsAndMels(SoundFolder):
    """Sounds and mel spectrograms in a folder."""

    suffixes = (*SoundFolder.suffixes, ".npy")
    what, forms = "sounds", f"{SoundFolder.forms}, or of .npy files of mel spectrograms"


def voice_folder(game: HifiGan, inputs: str, out: Path, device: torch.device) -> Path:
    """Write what the generator makes of each spectrogram: of a sound's own one, or of a given one."""
    path = Path(inputs).expanduser()
    source = SoundsAndMels(path.parent if path.is_file() else path)
    rows = [row for row in range(len(source)) if not path.is_file() or source.name(row) == str(path)]
    if not rows:
        raise UserError(f"{path} is no sound; give one, or {source.forms}")

    def read(row: int) -> Tensor:
        if not source.name(row).lower().endswith(".npy"):
            wave = torch.from_numpy(source.decoded(row, game.mel.rate)[0]).float()
            if len(wave) < game.mel.window:
                raise UserError(f"{source.name(row)}: it is too short, {len(wave):,} samples")
            return game.mel((wave * PEAK / wave.abs().max().clamp_min(1))[None].to(device))
        try:
            mel = read_mel(Path(source.name(row)), game.mel.bands)
        except (UserError, OSError, ValueError, EOFError) as error:
            raise UserError(f"{source.name(row)}: {reason(error)}") from error
        return torch.tensor(mel[None]).float().to(device)

    @torch.no_grad()
    def make(mel: Tensor) -> bytes:
        return Sound(game.generator(mel)[0], game.mel.rate).wav()

    return write_all(source, rows, out, ".wav", read, make)
