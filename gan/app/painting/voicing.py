"""`gan.sample RUN --inputs` of a run that makes sounds: of every sound or mel spectrogram of a folder, a WAV file."""

from pathlib import Path

import torch
from torch import Tensor

from datasets.files.sounds import PEAK, SoundFolder, read_mel
from gan.app.painting.translating import write_all
from gan.files.errors import UserError, reason
from gan.games.hifigan import HifiGan
from gan.sound import Sound


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
