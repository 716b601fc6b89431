"""Games whose generator can be cut into stages, and is made to be hard on a pipeline."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD, Adam

from gan import GanModule, Phase, Player, noise
from tests.support.hard_games import mlp

WIDTH = 8


class Modulated(nn.Module):
    """A block that sees the codes, draws noise, also from torch, and has a spectral norm, moved once a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.style, self.second = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, seen: dict[str, Tensor]) -> Tensor:
        inner = torch.tanh(self.first(x)) * self.style(seen["codes"]) + 0.1 * seen["first"]
        return x + 0.3 * self.second(inner + 0.1 * noise.randn(x.shape, like=x) + 0.1 * torch.randn_like(x))


class Tower(nn.Module):
    """Four blocks with skips over all of them, a parameter, noise and dropout between blocks, and several outputs.

    What the first layer returns reaches every stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(4, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.blocks = nn.ModuleList(Modulated() for _ in range(4))
        self.end = nn.Linear(WIDTH, 6)

    def forward(self, z: Tensor, codes: Tensor, strength: float = 0.1) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.start(z) * self.scale
        skips = []
        for block in self.blocks:
            skips.append(x)
            x = block(x, {"codes": codes, "first": skips[0]})
        x = x + 0.5 * skips[0] - skips[2] * self.scale.mean() + strength * noise.randn(x.shape, like=x)
        x[:, 0] = x[:, 0].tanh()
        x = nn.functional.dropout(x, strength)
        return self.end(x), {"size": x.square().mean(1), "codes": codes}


class Staged(GanModule):
    """An encoder whose codes reach every stage, so that its gradient comes from all of them."""

    micro_batches = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.generator, self.discriminator = nn.Linear(6, 3), Tower(), mlp(6, 1)
        self.teacher = Tower()

    def configure_players(self) -> Iterator[Player]:
        yield Player("encoder", self.encoder, partial(SGD, lr=1e-2))
        yield Player("generator", self.generator, partial(Adam, lr=1e-2, betas=(0.5, 0.9)), ema=0.8, clip=0.1)
        yield Player("discriminator", self.discriminator, partial(Adam, lr=2e-2))
        yield Player("teacher", self.teacher)

    def configure_phases(self) -> Iterator[Phase]:
        micro = {"micro_batches": self.micro_batches}
        yield Phase("discriminator", self.judge, "discriminator", **micro)
        yield Phase("generator", self.fool, ("encoder", "generator"), **micro)

    def paint(self, real: Tensor, strength: float = 0.1) -> tuple[Tensor, dict[str, Tensor]]:
        z = noise.randn((len(real), 4), like=real)
        return self.generator(z, codes=self.encoder(real), strength=strength)

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        real = batch["x"]
        with torch.no_grad():
            fake, _ = self.paint(real)
        return {
            "fake": softplus(self.discriminator(fake)).mean(),
            "real": softplus(-self.discriminator(real)).mean(),
        }

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        fake, seen = self.paint(batch["x"])
        twice, _ = self.paint(fake, strength=0.2)  # a second call, through which the first one's gradient flows
        told, _ = self.teacher(fake[:, :4], seen["codes"])
        return {
            "fooled": softplus(-self.discriminator(twice)).mean(),
            "size": seen["size"].mean(),
            "distance": (fake - told).square().mean(),
            "code": seen["codes"].square().mean(),
        }
