"""Sounds of a folder: decoded once at one rate, and cut into pieces of one length."""

import io
import math
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from datasets.files.cache import cache_folder, explained_write_errors, remember
from datasets.files.pictures import UsableSamples, raise_broken
from datasets.files.sources import Folder
from gan.files.disk import regular, whole_file
from gan.files.errors import UserError, explained, reason

PEAK = 0.95  # of a whole sound, as published
QUIET = math.log(1e-5)  # what mel spectrograms have where nothing is heard


class SoundFolder(Folder):
    """Sound files in a folder, however deep."""

    suffixes = (".wav", ".flac", ".ogg", ".mp3", ".opus", ".aiff", ".aif")
    what, forms = "sounds", "a folder of wav, flac, ogg or mp3 files"

    def __init__(self, path: str | Path) -> None:
        path = Path(path).expanduser()
        if not path.is_dir():
            raise UserError(f"{path} is no folder; give {self.forms}")
        super().__init__(path, classes=False)

    def decoded(self, index: int, rate: int) -> np.ndarray:
        """The sound as int16 at a rate, the mean of its channels."""
        needed = "to read sounds, two packages are needed; type pip install soundfile soxr"
        with explained(needed, ModuleNotFoundError):
            import soundfile
            import soxr
        try:
            with self.read(index) as file, soundfile.SoundFile(file) as sound:
                own, wave = sound.samplerate, sound.read(dtype="float64", always_2d=True).mean(1)
            if not np.isfinite(wave).all():
                raise UserError("it has values that are not finite")
            wave = wave if own == rate else soxr.resample(wave, own, rate)
        except (soundfile.SoundFileError, UserError, OSError, ValueError) as error:
            raise UserError(f"{self.name(index)}: {getattr(error, 'error_string', reason(error))}") from error
        return (wave * 32768).round().clip(-32768, 32767).astype(np.int16)


def read_mel(path: Path, bands: int) -> np.ndarray:
    """The spectrogram [bands, frames] in a file .npy, whose numbers stay on the disk."""
    regular(path)
    mel = np.load(path, mmap_mode="r", allow_pickle=False)
    mel = mel[0] if mel.ndim == 3 and len(mel) == 1 else mel
    if mel.ndim != 2 or len(mel) != bands or not mel.shape[1] or not np.issubdtype(mel.dtype, np.floating):
        raise UserError(f"it is {mel.dtype} {list(mel.shape)} and not float [{bands}, frames]")
    return mel


class Sounds(UsableSamples):
    """Items {"wave": float32 [length]} between -1 and 1, and with a folder of `mels` {"mel": [bands, frames]} too.

    A sound is scaled to a peak of 0.95, but not beside mels, as in the published fine-tuning. An item is the beginning
    of a sound, and `load_part` gives any other part. A shorter sound ends in silence. Files that cannot be used, or
    that are shorter than `least` samples, are an error that names them, unless `skip_broken` leaves them out.
    """

    source: SoundFolder

    def __init__(
        self,
        path: str | Path,
        rate: int,
        length: int,
        least: int = 1,
        skip_broken: bool = False,
        mels: str | Path | None = None,
        bands: int = 80,
        hop: int = 256,
    ) -> None:
        self.source, self.rate, self.length, self.least, self.hop = SoundFolder(path), rate, length, least, hop
        self.mels, self.bands = None if mels is None else Path(mels).expanduser(), bands
        stem = f"sounds-{zlib.crc32(repr((os.fspath(self.source.path.resolve()), rate)).encode()):08x}"
        self.folder = cache_folder(self.source.path) / stem
        texts, problems = remember(
            self.folder.with_suffix(".jsonl"), self.source.names, self.source.stamps, self._decode, "decoding sounds",
            good=lambda text: (self.folder / text.split()[-1]).exists(),
        )  # fmt: skip
        self._known = [(text or "").split() for text in texts]  # of all entries: see _decode
        self._whole: set[int] = set()  # entries whose file this process has compared with its checksum
        wrong = [self._wrong(entry) if words else "" for entry, words in enumerate(self._known)]
        self.problems = [*problems, *(f"{self.source.name(entry)}: {each}" for entry, each in enumerate(wrong) if each)]
        if self.problems and (not skip_broken or len(self.problems) == len(self.source)):
            raise_broken(self.source, self.problems)
        self.entries = np.array([entry for entry, words in enumerate(self._known) if words and not wrong[entry]])

    def _decode(self, entry: int) -> str:
        """Decode a sound into a file of the cache. Returns its length, its peak, and that file's checksum and name."""
        wave = self.source.decoded(entry, self.rate)
        stamp = b"".join([self.source.names[entry], self.source.stamps[entry].tobytes()])
        name = f"{zlib.crc32(stamp):08x}-{len(stamp)}-{entry}.npy"
        file = io.BytesIO()
        np.save(file, wave)
        with explained_write_errors(self.folder), whole_file(self.folder / name) as part:
            part.write_bytes(file.getbuffer())
        return f"{len(wave)} {int(np.abs(wave.astype(np.int32)).max(initial=0))} {zlib.crc32(file.getbuffer())} {name}"

    def _open(self, entry: int) -> np.ndarray:
        """A decoded sound, on the disk. If its file is no longer what was written, it is made again first."""
        *checksum, name = self._known[entry][2:]  # listings of before have none
        if entry not in self._whole:
            if checksum not in ([], [str(zlib.crc32((self.folder / name).read_bytes()))]):
                self._decode(entry)
            self._whole.add(entry)
        return np.load(self.folder / name, mmap_mode="r")

    def _wrong(self, entry: int) -> str:
        if (length := int(self._known[entry][0])) < self.least:
            return f"it is too short: {length:,} samples, and {self.least:,} are needed"
        try:
            self._mel(entry)
        except (UserError, OSError, ValueError, EOFError) as error:
            return f"its mel spectrogram {self._mel_file(entry)} cannot be used: {reason(error)}"
        return ""

    def _mel_file(self, entry: int) -> Path:
        return (self.mels or Path()) / Path(os.fsdecode(self.source.names[entry])).with_suffix(".npy")

    def _mel(self, entry: int) -> np.ndarray | None:
        return None if self.mels is None else read_mel(self._mel_file(entry), self.bands)

    @property
    def lengths(self) -> list[int]:
        """Of all sounds, in samples at this rate."""
        return [int(self._known[entry][0]) for entry in self.entries]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.load_part(index, 0.0)

    def load_part(self, index: int, where: float) -> dict[str, Any]:
        """The part of a sound that begins at a share of all possible beginnings, from 0 to below 1."""
        entry = int(self.entries[index])
        words = self._known[entry]
        whole, mel = self._open(entry), self._mel(entry)
        step = 1 if mel is None else self.hop
        known = len(whole) if mel is None else min(len(whole), mel.shape[1] * self.hop)
        start = int(where * (max(0, known - self.length) // step + 1)) * step
        scale = PEAK / max(1, int(words[1])) if mel is None else 1 / 32768
        piece = whole[start : start + self.length].astype(np.float64) * scale
        item = {"wave": _filled(piece, self.length, 0.0)}
        if mel is not None:
            frames = self.length // self.hop
            item["mel"] = _filled(mel[:, start // self.hop :][:, :frames], frames, QUIET)
        return item


def _filled(values: np.ndarray, length: int, rest: float) -> torch.Tensor:
    """The values as a tensor whose last side has that length."""
    wanted = [(0, 0)] * (values.ndim - 1) + [(0, length - values.shape[-1])]
    return torch.from_numpy(np.pad(values, wanted, constant_values=rest).astype(np.float32))
