"""HiFi-GAN, Kong, Kim and Bae 2020: from a mel spectrogram to its sound, judged by periods and by scales."""

from collections.abc import Iterator
from functools import partial, reduce
from operator import add

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import ExponentialLR

from gan import GanModule, Phase, Player
from gan.losses import feature_matching, least_squares_discriminator, least_squares_generator
from gan.sound import Sound
from nets.hifigan import HifiGenerator, PeriodJudges, ScaleJudges
from nets.mel import Mel


class HifiGan(GanModule):
    """Learns to make the sounds {"wave": [B, T]} from their mel spectrograms. T is a multiple of the hop of `mel`.

    Both turns use the same fake, as in the published training.
    """

    def __init__(
        self,
        generator: HifiGenerator,
        periods: PeriodJudges,
        scales: ScaleJudges,
        mel: Mel,
        *,
        rate: float = 2e-4,
        decay: float = 0.999,
        matching: float = 2.0,
        closeness: float = 45.0,
    ) -> None:
        super().__init__()
        self.generator, self.periods, self.scales, self.mel = generator, periods, scales, mel
        self.rate, self.decay, self.matching, self.closeness = rate, decay, matching, closeness

    def configure_players(self) -> Iterator[Player]:
        """All learn at one rate, which falls a little in every epoch (section 3.1)."""
        adam = partial(AdamW, lr=self.rate, betas=(0.8, 0.99), weight_decay=0.01)
        decay = partial(ExponentialLR, gamma=self.decay)
        for name in ("generator", "periods", "scales"):
            yield Player(name, getattr(self, name), adam, decay, schedule_per="epoch")

    def configure_phases(self) -> Iterator[Phase]:
        """The discriminators' turn comes first."""
        yield Phase("discriminators", self.judge, ("periods", "scales"))
        yield Phase("generator", self.fool, "generator")

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tell the fake from the wave (equations 1 and 6)."""
        wave = batch["wave"]
        fake = self.shared("fake", self.voice, wave).detach()
        return {
            # Least squares of Mao et al. 2017, here without the half.
            name: reduce(
                add,
                (
                    2 * least_squares_discriminator(real[-1], made[-1])
                    for real, made in zip(judges(wave), judges(fake), strict=True)
                ),
            )
            for name, judges in (("periods", self.periods), ("scales", self.scales))
        }

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Please each judge, look like the wave to each of its layers, and have the wave's spectrogram (equation 5)."""
        wave = batch["wave"]
        fake = self.shared("fake", self.voice, wave)
        made = self.periods(fake) + self.scales(fake)
        with torch.no_grad():
            real = self.periods(wave) + self.scales(wave)
        return {
            "adversarial": reduce(add, (least_squares_generator(features[-1]) for features in made)),
            "matching": self.matching * len(made) * feature_matching(real, made),  # summed over the judges
            "mel": self.closeness * self.mel_error(fake, wave),
        }

    def voice(self, wave: Tensor) -> Tensor:
        """The generator's wave for the spectrogram of this one."""
        return self.generator(self.mel(wave))

    def mel_error(self, fake: Tensor, wave: Tensor) -> Tensor:
        """How far two waves are apart in their mel spectrograms (equation 3)."""
        return F.l1_loss(self.mel(fake), self.mel(wave))

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """Log the error of held-out sounds."""
        error = self.mel_error(self.voice(batch["wave"]), batch["wave"])
        self.log("val/mel_error", error, sync_dist=True, batch_size=len(batch["wave"]))

    @torch.no_grad()
    def show(self, batch: dict[str, Tensor]) -> dict[str, Sound]:
        """The sounds, and what was made of their spectrograms."""
        wave = batch["wave"]
        return {"real": Sound(wave, self.mel.rate), "generated": Sound(self.voice(wave), self.mel.rate)}
