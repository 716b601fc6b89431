"""WGAN-GP, Gulrajani et al. 2017: a critic that learns more often, and whose slope is held at 1."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.optim import Adam

from gan import Phase, Player
from gan.games.from_noise import FromNoise
from gan.losses import gradient_penalty, wasserstein_critic, wasserstein_generator
from nets.wgan import WganCritic, WganGenerator


class WganGp(FromNoise):
    """Learns to draw pictures like {"image"}. The critic learns in every step, the generator in some steps.

    `critic_steps` is the published n_critic. The critic sees a new batch in every step, as published, so the generator
    has `max_steps / critic_steps` updates. Both learn at step 0; from then on there are `critic_steps` updates of the
    critic for each of the generator.
    """

    def __init__(
        self,
        generator: WganGenerator,
        critic: WganCritic,
        *,
        rate: float = 1e-4,
        critic_steps: int = 5,
        penalty: float = 10.0,
        ema: float | None = None,
    ) -> None:
        super().__init__()
        self.generator, self.critic = generator, critic
        self.rate, self.critic_steps, self.penalty, self.ema = rate, critic_steps, penalty, ema

    def configure_players(self) -> Iterator[Player]:
        """No momentum. The paper keeps no average of the generator; with `ema` there is one."""
        adam = partial(Adam, lr=self.rate, betas=(0.0, 0.9), fused=True)
        yield Player("generator", self.generator, adam, ema=self.ema)
        yield Player("critic", self.critic, adam)

    def configure_phases(self) -> Iterator[Phase]:
        """Several turns of the critic for one of the generator (algorithm 1)."""
        yield Phase("critic", self.judge, "critic", second_order=True)
        yield Phase("generator", self.please, "generator", every=self.critic_steps)

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tell pictures from fakes by as much as a slope of 1 allows."""
        real = batch["image"]
        with torch.no_grad():
            fake = self.draw(real)
        return {
            "wasserstein": wasserstein_critic(self.critic(real), self.critic(fake)),
            "penalty": self.penalty * gradient_penalty(self.critic, real, fake),
        }

    def please(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Raise the critic's score."""
        return {"wasserstein": wasserstein_generator(self.critic(self.draw(batch["image"])))}
