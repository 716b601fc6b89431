"""DMD2, Yin et al. 2024b: a diffusion model distilled into a generator that needs one step."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam

from gan import Phase, Player, noise
from gan.games.from_noise import FromNoise
from gan.losses import denoising, distribution_matching, non_saturating_discriminator, non_saturating_generator
from nets.denoiser import Denoiser, Head, OneStep
from nets.lora import adapted, adapters


class Dmd2(FromNoise):
    """A student learns to draw in one step what a frozen teacher would denoise to. A batch is {"image"}.

    The fake score is a denoiser that follows the student's pictures: it learns in every step. The difference between
    the teacher's denoising and the fake score's says where the student's pictures should move. A head on the fake
    score's inner features tells these pictures from true ones, so the student can become better than the teacher.
    `student_every` is the two time-scale rule of the paper, section 4.2: fake score and head have this many updates
    for one of the student. `teacher(noisy, sigma)` gives denoised pictures, for noise of `sigmas[0]` to `sigmas[1]`.
    """

    def __init__(
        self,
        student: nn.Module,
        fake_score: Denoiser,
        head: Head,
        teacher: nn.Module,
        *,
        student_rate: float = 1e-3,
        rate: float = 1e-3,
        student_every: int = 5,
        adversarial: float = 3e-3,
        head_weight: float = 1e-2,
        sigmas: tuple[float, float] = (0.1, 10.0),
        ema: float | None = None,
    ) -> None:
        super().__init__()
        self.student, self.fake_score, self.head, self.teacher = student, fake_score, head, teacher
        self.student_rate, self.rate, self.student_every = student_rate, rate, student_every
        self.adversarial, self.head_weight, self.sigmas, self.ema = adversarial, head_weight, sigmas, ema

    @property
    def drawer(self) -> nn.Module:
        return self.student

    def configure_players(self) -> Iterator[Player]:
        """Three players learn, without momentum because what each of them follows moves. The teacher is frozen."""
        adam = partial(Adam, lr=self.rate, betas=(0.0, 0.99), fused=True)
        yield Player("student", self.student, partial(adam, lr=self.student_rate), ema=self.ema)
        yield Player("fake_score", self.fake_score, adam)
        yield Player("head", self.head, adam)
        yield Player("teacher", self.teacher)

    def configure_phases(self) -> Iterator[Phase]:
        """Fake score and head learn together, from one loss. The student learns less often."""
        yield Phase("guidance", self.follow, ("fake_score", "head"))
        yield Phase("student", self.distil, "student", every=self.student_every)

    def follow(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Denoise what the student draws now, and tell it from pictures. Both losses teach the fake score."""
        image = batch["image"]
        with torch.no_grad():
            fake = self.draw(image)
        noisy, sigma = self.diffuse(fake)
        scores = self.head(self.fake_score.features(*self.diffuse(torch.cat([image, fake]))))
        return {
            "denoising": denoising(self.fake_score(noisy, sigma), fake, sigma, self.fake_score.spread),
            "adversarial": self.head_weight * non_saturating_discriminator(*scores.chunk(2)),
        }

    def distil(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Move the pictures towards the teacher's denoising and away from the fake score's, and deceive the head."""
        fake = self.draw(batch["image"])
        with torch.no_grad():
            noisy, sigma = self.diffuse(fake)
            wanted, found = self.teacher(noisy, sigma), self.fake_score(noisy, sigma)
        scores = self.head(self.fake_score.features(*self.diffuse(fake)))
        return {
            "matching": distribution_matching(fake, wanted, found),
            "adversarial": self.adversarial * non_saturating_generator(scores),
        }

    def diffuse(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """Pictures with noise of a random size, and the size for each picture, [B]."""
        # EDM, Karras et al. 2022, equation 5 with rho = 7, where a random number takes the place of i / (N - 1).
        low, high = (sigma ** (1 / 7) for sigma in self.sigmas)
        sigma = (low + noise.rand((len(pictures),), like=pictures) * (high - low)) ** 7
        return pictures + sigma[:, None, None, None] * noise.randn(pictures.shape, like=pictures), sigma


class Dmd2Lora(Dmd2):
    """DMD2 (Yin et al. 2024b) with LoRA (Hu et al. 2021), as large models are distilled. A batch is {"image"}.

    Three networks would need three times the memory. Here all three are the base. Only the adapters of student and
    fake score have gradients, optimizer state and averages. As in the paper, both begin as the teacher, because an
    adapter is zero at first. The student draws in one step from noise of size `sigmas[1]`.

    A base that is not trained yet learns to denoise in the first `base_steps` steps, and is frozen after them. With 0
    it has its weights already, and is frozen from the beginning.
    """

    teacher: Denoiser

    def __init__(
        self,
        base: Denoiser,
        head: Head,
        size: int,
        *,
        rank: int = 8,
        base_steps: int = 0,
        sigmas: tuple[float, float] = (0.1, 10.0),
        **settings: Any,
    ) -> None:
        student = OneStep(adapted(base, rank), size, sigmas[1])
        super().__init__(student, adapted(base, rank), head, base, sigmas=sigmas, **settings)
        self.base_steps = base_steps

    def configure_players(self) -> Iterator[Player]:
        """The players of DMD2, but of student and fake score only the adapters learn."""
        student, fake_score, head, teacher = super().configure_players()
        yield replace(student, module=adapters(self.student))
        yield replace(fake_score, module=adapters(self.fake_score))
        yield head
        yield replace(teacher, optimizer=partial(Adam, lr=self.rate, fused=True)) if self.base_steps else teacher

    def configure_phases(self) -> Iterator[Phase]:
        """First the base learns, then all phases of DMD2 begin."""
        if self.base_steps:
            yield Phase("base", self.denoise, "teacher", until=self.base_steps)
        for phase in super().configure_phases():
            yield replace(phase, start=self.base_steps)

    def denoise(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a diffusion model, EDM of Karras et al. 2022."""
        image = batch["image"]
        noisy, sigma = self.diffuse(image)
        return denoising(self.teacher(noisy, sigma), image, sigma, self.teacher.spread)
