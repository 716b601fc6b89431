"""DMD2 by adapters: student and fake score are low-rank additions to one frozen base, which is also the teacher."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor
from torch.optim import Adam

from gan import Phase, Player
from gan.games.dmd2 import Dmd2
from gan.losses import denoising
from nets.denoiser import Denoiser, Head, OneStep
from nets.lora import adapted, adapters


class Dmd2Lora(Dmd2):
    """DMD2 (Yin et al. 2024b) with LoRA (Hu et al. 2021), as large models are distilled. A batch is {"image"}.

    Three networks would need three times the memory. Here all three are the base. Only the adapters of student and
    fake score have gradients, optimizer state and averages. As in the paper, both begin as the teacher, because an
    adapter is zero at first. The student draws in one step from noise of size `sigmas[1]`.

    A base that is not trained yet learns to denoise in the first `base_steps` steps, and is frozen after them. With 0
    it has its weights already, and is frozen from the beginning.
    """

    def __init__(
        self,
        base: Denoiser,
        head: Head,
        size: int,
        *,
        rank: int = 8,
        base_steps: int = 0,
        sigmas: tuple[float, float] = (0.1, 10.0),
        **settings: object,
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
        yield replace(teacher, optimizer=partial(Adam, lr=self.rate)) if self.base_steps else teacher

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
