"""DMD2, Yin et al. 2024b: a diffusion model distilled into a generator that needs one step."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Adam

from gan import Phase, Player, noise
from gan.games.from_noise import FromNoise
from gan.losses import denoising, distribution_matching, non_saturating_discriminator, non_saturating_generator
from nets.denoiser import Denoiser, Head


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
        yield Player("student", self.student, partial(Adam, lr=self.student_rate, betas=(0.0, 0.99)), ema=self.ema)
        yield Player("fake_score", self.fake_score, partial(Adam, lr=self.rate, betas=(0.0, 0.99)))
        yield Player("head", self.head, partial(Adam, lr=self.rate, betas=(0.0, 0.99)))
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

    @torch.no_grad()
    def show(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Fakes from always the same noise, beside the nearest of the teacher's pictures, and pictures of the batch."""
        columns = super().show(batch)
        if hasattr(self.teacher, "nearest"):
            columns = {"output": columns["output"], "nearest of teacher's": self.teacher.nearest(columns["output"])} | {
                name: column for name, column in columns.items() if name != "output"
            }
        return columns
