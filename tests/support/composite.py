"""One game with everything that is hard on a policy, and one whose sizes are easy to count."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR

from gan import GanModule, Phase, Player, noise
from tests.support.hard_games import Synthesis, by_shape, mlp


class Painter(Synthesis):
    """Has a batch norm too."""

    def __init__(self) -> None:
        super().__init__()
        # What is the same for all samples may not stand directly before a norm: its gradient would be rounding noise.
        norm = nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8)
        self.layers = nn.Sequential(nn.Linear(7, 8), nn.Tanh(), *norm, nn.Tanh(), nn.Linear(8, 6))


class Composite(GanModule):
    """The game that every policy must train as one device does.

    It has own methods, a frozen weight and a frozen player, averages, clipping, schedules, groups of weights, batch
    norm, R1 through batch norm, micro-batches, a phase of several learners, a phase that is not due in every step, a
    fake that two phases share, and weights that are reached by some samples only, or by none.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.generator = Painter()
        self.discriminator = nn.Sequential(
            nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1, bias=False)
        )
        self.critic = nn.ModuleList([mlp(6, 1) for _ in range(4)])
        self.teacher = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def configure_players(self) -> Iterator[Player]:
        falling = partial(LambdaLR, lr_lambda=lambda update: 0.9**update)
        yield Player("generator", self.generator, partial(Adam, lr=1e-2, betas=(0.5, 0.9)), falling, 0.8, 0.1)
        yield Player("discriminator", self.discriminator, partial(Adam, lr=2e-2), clip=0.1)
        yield Player("critic", self.critic, by_shape, falling, 0.7, 0.2)
        yield Player("teacher", self.teacher)

    def configure_phases(self) -> Iterator[Phase]:
        # No batch norm in micro-batches: each of them would have statistics of its own.
        yield Phase("critic", self.criticise, "critic", micro_batches=2)
        yield Phase("discriminator", self.judge, "discriminator", second_order=True)
        yield Phase("generator", self.fool, ("generator", "critic"))
        yield Phase("rarely", self.rarely, "critic", every=3)

    def fake(self, real: Tensor) -> Tensor:
        return self.generator.synthesize(noise.randn((len(real), 4), like=real))

    def score(self, x: Tensor) -> Tensor:
        """Each sample's own layers; the last of them are nobody's."""
        number = (x[:, 0].detach() > 0).long() + (x[:, 1].detach() > 1.2).long()
        parts = [self.critic[k](x[number == k]).tanh().sum() for k in number.unique().tolist()]
        return torch.stack(parts).sum() / len(x)

    def criticise(self, batch: dict[str, Tensor]) -> Tensor:
        real = batch["x"]
        return self.score(real + 0.5 * noise.randn(real.shape, like=real)) - self.score(real)

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        fake = self.shared("fake", self.fake, batch["x"]).detach()
        real = self.teacher(batch["x"]).detach().requires_grad_()
        scores = self.discriminator(real)
        (slope,) = torch.autograd.grad(scores.sum(), real, create_graph=True)
        return {
            "fake": softplus(self.discriminator(fake)).mean(),
            "real": softplus(-scores).mean(),
            "r1": slope.square().sum(1).mean(),
        }

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        fake = self.shared("fake", self.fake, batch["x"])
        return {"judge": softplus(-self.discriminator(self.teacher(fake))).mean(), "critic": self.score(fake)}

    def rarely(self, batch: dict[str, Tensor]) -> Tensor:
        return self.score(batch["x"])


MIXES = ["generator=zero3,*=ddp", "generator=zero1,*=zero3", "generator=ddp,discriminator=zero2,*=zero3"]
WIDTH = 256


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH - 1), nn.Linear(WIDTH - 1, WIDTH))


class Sized(GanModule):
    """Three players of the same size: each phase has a learner, a player that is read, and one that plays no part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.idle = layers(), layers(), layers()

    def configure_players(self) -> Iterator[Player]:
        yield Player("first", self.first, partial(Adam, lr=1e-3), ema=0.9)
        yield Player("second", self.second, partial(Adam, lr=1e-3), ema=0.9)
        yield Player("idle", self.idle)

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("first", self.please, "first", second_order=True)
        yield Phase("second", self.tell, "second", micro_batches=4)

    def tell(self, batch: dict[str, Tensor]) -> Tensor:
        return self.second(self.first(wide(batch)).tanh()).mean()

    def please(self, batch: dict[str, Tensor]) -> Tensor:
        """With a penalty on the second player's slope, which differentiates a gradient."""
        made = self.first(wide(batch))
        score = self.second(made).square().mean()
        (slope,) = torch.autograd.grad(score, made, create_graph=True)
        return score + slope.square().mean()


class SizedTwice(Sized):
    """A player that a further phase updates by an optimizer of its own."""

    def configure_phases(self) -> Iterator[Phase]:
        yield from super().configure_phases()
        yield Phase("again", self.please, "first", second_order=True, optimizer=partial(Adam, lr=1e-3))


class SizedEvenly(Sized):
    """The same with players that four ranks can share layer by layer, and without the penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = (
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))) for _ in range(3)
        )

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("first", lambda batch: self.second(self.first(wide(batch))).square().mean(), "first")
        yield Phase("second", self.tell, "second", micro_batches=4)


def wide(batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.pad(batch["x"], (0, WIDTH - 6))
