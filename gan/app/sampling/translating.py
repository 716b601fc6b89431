"""`gan.sample RUN --inputs`: every file of a folder, translated by a run's network.

Pictures become pictures of the same size, or maps of codes. Maps of codes or of labels become pictures. Sounds and
mel spectrograms become WAV files.
"""

import io
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from datasets.files.cache import listed
from datasets.files.decoding import SUFFIXES, Frame
from datasets.files.find import absent_data, find_source
from datasets.files.pairs import MAPS, loaded
from datasets.files.sides import cut
from datasets.files.sounds import PEAK, SoundFolder, read_mel
from datasets.files.sources import Folder, Source
from gan.app.outputs import say
from gan.app.sampling import grids
from gan.app.sampling.painter import Maps
from gan.app.sampling.sheet import writer_into, writing
from gan.files.disk import regular, write_whole
from gan.files.errors import UserError, explained, progress
from gan.games.translation import Translation
from gan.making import drawing_from
from gan.sound import Sound
from nets.hifigan import HifiGenerator
from nets.mel import PIECE, Mel


def translation_of(game: Any, title: str, direction: str | None) -> Translation:
    """The game's translation of that name; without a name its first one, which is said."""
    known = game.translations() if hasattr(game, "translations") else {}
    if not known:
        raise UserError(f"{title}: its game translates no pictures, so --inputs does nothing; type show")
    if direction is not None and direction not in known:
        raise UserError(f"{title} has no direction {direction}; known: {', '.join(known)}")
    if direction is None:
        say(f"direction {(direction := next(iter(known)))}")
    return known[direction]


@dataclass(frozen=True)
class Translator:
    """A translation of a person's own files: of pictures, of maps of codes, or of label maps.

    With `largest` they are made smaller whose longer side has more pixels. `half`: the run reads this half of its
    pictures, 0 or 1. It is cut from pictures twice as wide as high, or from all where the run's are `any_shape`.
    """

    chosen: Translation
    device: torch.device
    largest: int | None = None
    background: str = "white"
    half: int | None = None
    any_shape: bool = False

    def of_picture(self, picture: Image.Image) -> Image.Image:
        if self.chosen.codes or self.chosen.encodes:
            raise UserError("codes are not pictures of Pillow; give --inputs a path")
        self._say_half()
        return grids.picture(self._made(self._read(picture, "the label map")), transparent=True)

    def of_folder(self, inputs: str, out: Path) -> Path:
        """Write each picture's translation as a PNG of the same name and size; codes are in files .npy [h, w]."""
        self._say_half()
        chosen, path = self.chosen, Path(inputs).expanduser()
        if chosen.codes or chosen.labels:
            kind = Codes if chosen.codes else LabelMaps
            if not path.exists():
                raise absent_data(inputs, option="--inputs")
            source = kind(path, classes=False)
        elif path.is_file() and path.suffix.lower() in SUFFIXES:
            source = Folder(path, classes=False)
        else:
            source = find_source(inputs, classes=False, option="--inputs")

        def make(row: int) -> bytes:
            if chosen.codes:
                found = _array(source.name(row), partial(read_codes, codes=chosen.codes))
            elif chosen.labels:
                name = Path(source.name(row))
                found = self._read(loaded(name), name)
            else:
                with source.opened(row) as picture:
                    found = self._read(picture)
            made = self._made(found)
            return npy(made) if chosen.encodes else grids.png(grids.picture(made, transparent=True))

        return write_all(source, out, ".npy" if chosen.encodes else ".png", make)

    def _made(self, found: Tensor) -> Tensor:
        return translated(self.chosen, found[None].to(self.device))[0]

    def _read(self, picture: Image.Image, name: str | Path = "") -> Tensor:
        """What the network takes of a picture, or of a label map, whose `name` is for errors."""
        chosen = self.chosen
        if not chosen.labels:
            picture = ImageOps.exif_transpose(picture)
            if self.half is not None and (self.any_shape or picture.width == 2 * picture.height):
                picture = cut(picture, self.half)
        scale = min(1.0, (self.largest or max(picture.size)) / max(picture.size))
        width, height = (max(1, round(side * scale)) for side in picture.size)
        if chosen.labels:
            return Maps((height, width), chosen.labels, chosen.void).read(picture, name).float()[None]
        return Frame(height, width, chosen.channels, background=self.background).pixels(picture).float() / 127.5 - 1

    def _say_half(self) -> None:
        if self.half is not None:
            which = "each picture" if self.any_shape else "a picture twice as wide as high"
            say(f"of {which}, the {('left', 'right')[self.half]} half is translated, as in training")


def write_all(source: Source, out: Path, ending: str, make: Callable[[int], bytes]) -> Path:
    """Write what is made of each file, under its name with another ending. What could not be is an error at the end."""
    if source.note:
        say(f"left out of {source.path}: {source.note}; {source.what} are {' '.join(source.suffixes)} here")
    names, problems = _names([os.fsdecode(name) for name in source.names], ending), []
    if out.suffix.lower() == ending and len(names) == 1:  # a name such as painted.png is that of the file
        with writing(out):
            write_whole(out, make(0))
        return out
    with writing(out), writer_into(out) as write, progress(names, desc="translating", unit="file") as bar:
        for row, name in enumerate(bar):
            try:
                found = make(row)
            except UserError as error:
                own = os.fsdecode(source.names[row])
                problems.append(str(error) if own in str(error) else f"{own}: {error}")
                continue
            write(name, found)
        if len(problems) == len(names):
            raise UserError(listed(f"no {source.what.removesuffix('s')} in {source.path} can be read:", problems))
    if problems:
        title = f"left out {len(problems)} of {len(names)} {source.what} in {source.path}; the others are in {out}:"
        raise UserError(listed(title, problems))
    return out


@torch.no_grad()
def translated(chosen: Translation, pictures: Tensor, seed: int = 0) -> Tensor:
    """Translations of pictures from -1 to 1, of their size: they are padded to what the network takes, and cut back."""
    height, width = pictures.shape[-2:]
    bottom, right = -height % chosen.multiple, -width % chosen.multiple
    if bottom or right:
        mode = "reflect" if bottom < height and right < width else "replicate"
        pictures = F.pad(pictures, (0, right, 0, bottom), mode)
    with drawing_from(seed, pictures.device):  # so that dropout is the same for a picture each time
        made = chosen.paint(pictures)
    return made[..., :height, :width] if bottom or right else made


def _names(names: list[str], ending: str) -> list[str]:
    """The names with that ending; if any differ by their endings alone, behind all whole names."""
    plain = [str(PurePosixPath(name).with_suffix(ending)) for name in names]
    return plain if len(set(plain)) == len(plain) else [f"{name}{ending}" for name in names]


def _array(name: str, read: Callable[[Path], np.ndarray]) -> Tensor:
    with explained(f"{name}: {{why}}", UserError, OSError, ValueError, EOFError):
        return torch.from_numpy(np.array(read(Path(name))))


class LabelMaps(Folder):
    suffixes = MAPS
    what, forms = "label maps", "a folder of PNGs whose values are labels, or in the colours that gan.edit saves"


class Codes(Folder):
    suffixes = (".npy",)
    what, forms = "maps of codes", "a folder of .npy files, as --direction codes writes them"


def read_codes(path: Path, codes: int) -> np.ndarray:
    """The numbers of codes [h, w] in a file .npy."""
    regular(path)
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    if found.ndim != 2 or not found.size or not np.issubdtype(found.dtype, np.integer):
        raise UserError(f"it is {found.dtype} {list(found.shape)} and not whole numbers [height, width]")
    if found.min() < 0 or found.max() >= codes:
        raise UserError(f"it has numbers from {found.min()} to {found.max()}, and the codes are 0 to {codes - 1}")
    return found.astype(np.int64)


def npy(numbers: Tensor) -> bytes:
    """A file .npy, which needs no package but NumPy to read."""
    file = io.BytesIO()
    np.save(file, numbers.cpu().numpy())
    return file.getvalue()


class SoundsAndMels(SoundFolder):
    suffixes = (*SoundFolder.suffixes, ".npy")
    what, forms = "sounds", f"{SoundFolder.forms}, or of .npy files of mel spectrograms"

    def __init__(self, path: Path) -> None:
        if path.is_file() and path.suffix.lower() in self.suffixes:
            Folder.__init__(self, path, classes=False)
        else:
            super().__init__(path)


def voice_folder(generator: HifiGenerator, to_mel: Mel, inputs: str, out: Path, device: torch.device) -> Path:
    """Write what the generator makes of each spectrogram: of a sound's own one, or of a given one."""
    source = SoundsAndMels(Path(inputs).expanduser())

    @torch.no_grad()
    def make(row: int) -> bytes:
        if source.name(row).lower().endswith(".npy"):
            mel = _array(source.name(row), partial(read_mel, bands=to_mel.bands))[None].float().to(device)
        else:
            wave = torch.from_numpy(source.decoded(row, to_mel.rate)).float()
            if len(wave) < to_mel.window:
                raise UserError(f"{source.name(row)}: it is too short, {len(wave):,} samples")
            mel = to_mel((wave * PEAK / wave.abs().max().clamp_min(1))[None].to(device))
        pieces, count = generator.pieces(mel), math.ceil(mel.shape[-1] / PIECE)
        shown = progress(pieces, "a long sound", count, leave=False, delay=2, unit="piece")
        return Sound(torch.cat([piece[0].cpu() for piece in shown]), to_mel.rate).wav()

    return write_all(source, out, ".wav", make)
