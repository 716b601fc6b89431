"""HiFi-GAN, Kong, Kim and Bae 2020: from a mel spectrogram to its sound, judged by periods and by scales."""

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import ExponentialLR

from gan import GanModule, Phase, Player
from gan.losses import least_squares_discriminator, least_squares_generator
from gan.sound import Sound
from nets.hifigan import HifiGenerator, Judges
from nets.mel import Mel, spectral_distance
from nets.published.files import PublishedFile
from nets.published.hifigan import files

MATCHING, CLOSENESS = 2.0, 45.0  # weights of losses, as published


class HifiGan(GanModule):
    """Learns to make the sounds {"wave": [B, T]} from their mel spectrograms. T is a multiple of the hop of `mel`.

    Where a batch has {"mel"}, these spectrograms of another network are used, as in the published fine-tuning. Both
    turns use the same fake. The loss hears the spectrogram up to half the rate, the generator as far as `mel` goes.
    """

    def __init__(
        self,
        generator: HifiGenerator,
        discriminators: Judges,
        mel: Mel,
        *,
        rate: float = 2e-4,
        decay: float = 0.999,
        segment: int | None = None,
        batch: int = 16,
    ) -> None:
        """`segment` and `batch` are told to the published config.json alone; else it has those published."""
        super().__init__()
        self.told = {"segment_size": segment or 32 * mel.hop, "batch_size": batch}
        self.generator, self.discriminators, self.mel = generator, discriminators, mel
        self.whole_mel = Mel(mel.rate, mel.bands, mel.window, mel.hop, bottom=mel.bottom)
        self.rate, self.decay = rate, decay

    def configure_players(self) -> Iterator[Player]:
        """Both learn at one rate, which falls a little in every epoch (section 3.1)."""
        adam = partial(AdamW, lr=self.rate, betas=(0.8, 0.99), weight_decay=0.01, fused=True)
        decay = partial(ExponentialLR, gamma=self.decay)
        yield Player("generator", self.generator, adam, decay, schedule_per="epoch")
        yield Player("discriminators", self.discriminators, adam, decay, schedule_per="epoch")

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("discriminators", self.judge, "discriminators")
        yield Phase("generator", self.fool, "generator")

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tell the fake from the wave (equations 1 and 6). The wave is judged first, as spectral norm remembers."""
        real = self.discriminators(batch["wave"])
        made = self.discriminators(self.shared("fake", self.voice, batch).detach())
        # Least squares of Mao et al. 2017, here without the half.
        pairs = {name: zip(real[name], made[name], strict=True) for name in real}
        return {
            name: _sum(2 * least_squares_discriminator(theirs[-1], ours[-1]) for theirs, ours in pairs[name])
            for name in pairs
        }

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Please each judge, look like the wave to each of its layers, and have the wave's spectrogram (equation 5)."""
        wave, fake = batch["wave"], self.shared("fake", self.voice, batch)
        with torch.no_grad():
            real = self.discriminators(wave)
        made = self.discriminators(fake)
        losses = {"mel": CLOSENESS * self.mel_error(fake, wave)}
        for name in made:
            losses[f"adversarial_{name}"] = _sum(least_squares_generator(judge[-1]) for judge in made[name])
            pairs = zip(chain(*made[name]), chain(*real[name]), strict=True)  # of the scores too, as published
            losses[f"matching_{name}"] = MATCHING * _sum(F.l1_loss(*pair) for pair in pairs)
        return losses

    def voice(self, batch: dict[str, Tensor]) -> Tensor:
        """The generator's waves for the spectrograms of a batch."""
        return self.generator(batch["mel"] if "mel" in batch else self.mel(batch["wave"]))

    def mel_error(self, fake: Tensor, wave: Tensor) -> Tensor:
        """How far two waves are apart in their mel spectrograms (equation 3)."""
        return F.l1_loss(self.whole_mel(fake), self.whole_mel(wave))

    def published(self) -> list[PublishedFile]:
        return files(self.generator, self.discriminators, self.mel, self.rate, self.decay, self.told)

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        wave, fake = batch["wave"], self.voice(batch)
        log = partial(self.log, sync_dist=True, batch_size=len(wave))
        log("val/mel_error", self.mel_error(fake, wave))
        log("val/spectral_error", spectral_distance(fake, wave).mean())

    @torch.no_grad()
    def show(self, batch: dict[str, Tensor]) -> dict[str, Sound]:
        wave = batch["wave"]
        return {"real": Sound(wave, self.mel.rate), "generated": Sound(self.voice(batch), self.mel.rate)}


def _sum(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack(list(parts)).sum()
