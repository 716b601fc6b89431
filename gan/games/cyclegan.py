"""CycleGAN, Zhu et al. 2017: from one kind of pictures to another and back, without pairs."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gan import Phase, Player
from gan.games.from_noise import Compared
from gan.games.translation import Translation, of_generator
from gan.losses import least_squares_discriminator, least_squares_generator
from gan.pool import ImagePool
from nets.published.files import PublishedFile, latest_nets
from nets.resnet import ResnetGenerator


class CycleGan(Compared):
    """Two generators and two discriminators, one optimizer a pair. A batch is {"a", "b"}.

    For validation a batch may have the truth, {"truth_a", "truth_b"}: what "b" looks like as an "a", and "a" as a "b".
    `generator` and `discriminator` are functions that make one network each; no sample may change another's output.
    `identity` is a part of `cycle`, as published.
    """

    def __init__(
        self,
        generator: Callable[[], ResnetGenerator],
        discriminator: Callable[[], nn.Module],
        decay: Callable[[Optimizer], LRScheduler],
        *,
        rate: float = 2e-4,
        cycle: float = 10.0,
        identity: float = 0.5,
        pool: int = 50,
    ) -> None:
        super().__init__()
        self.generators = nn.ModuleDict({"to_b": generator(), "to_a": generator()})
        self.discriminators = nn.ModuleDict({"of_b": discriminator(), "of_a": discriminator()})
        self.past_b, self.past_a = ImagePool(pool), ImagePool(pool)
        self.decay, self.rate, self.cycle, self.identity = decay, rate, cycle, identity

    def configure_players(self) -> Iterator[Player]:
        adam = partial(Adam, lr=self.rate, betas=(0.5, 0.999), fused=True)
        yield Player("generators", self.generators, adam, self.decay)
        yield Player("discriminators", self.discriminators, adam, self.decay)

    def configure_phases(self) -> Iterator[Phase]:
        """The generators' turn comes first. Then the discriminators judge the same fakes, or past ones."""
        yield Phase("generators", self.fool, "generators")
        yield Phase("discriminators", self.judge, "discriminators")

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Please the discriminators, come back to the start when translated twice, and keep what needs no change."""
        a, b = batch["a"], batch["b"]
        fake_b, fake_a = self.fakes(a, b)
        again_a, same_a = self.together(self.generators["to_a"], fake_b, a)
        again_b, same_b = self.together(self.generators["to_b"], fake_a, b)
        losses = {
            "gan_b": least_squares_generator(self.discriminators["of_b"](fake_b)),
            "gan_a": least_squares_generator(self.discriminators["of_a"](fake_a)),
            "cycle_a": self.cycle * F.l1_loss(again_a, a),
            "cycle_b": self.cycle * F.l1_loss(again_b, b),
        }
        if self.identity:
            losses["identity_a"] = self.cycle * self.identity * F.l1_loss(same_a, a)
            losses["identity_b"] = self.cycle * self.identity * F.l1_loss(same_b, b)
        return losses

    def together(self, generator: nn.Module, fake: Tensor, real: Tensor) -> Sequence[Tensor]:
        """Both translated in one pass, which is faster than two; the real ones only where their loss counts."""
        return generator(torch.cat([fake, real])).split(len(fake)) if self.identity else (generator(fake), real)

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tell fakes from pictures; half of the fakes are from the pools."""
        fake_b, fake_a = self.fakes(batch["a"], batch["b"])
        pairs = {"b": (batch["b"], self.past_b.query(fake_b)), "a": (batch["a"], self.past_a.query(fake_a))}
        scores = {which: self.discriminators[f"of_{which}"](torch.cat(pair)).chunk(2) for which, pair in pairs.items()}
        return {f"gan_{which}": least_squares_discriminator(*each) for which, each in scores.items()}

    def fakes(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """The fakes of this step, made once for both turns."""
        return self.shared("fakes", self.translate, a, b)

    def translate(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """`a` as a "b" and `b` as an "a"."""
        return self.generators["to_b"](a), self.generators["to_a"](b)

    def published(self) -> list[PublishedFile]:
        """G_A makes B of A, and D_A judges B. A released generator, `latest_net_G.pth`, is taken for G_A."""
        to_b, to_a = self.generators.values()
        of_b, of_a = self.discriminators.values()
        networks = {"G_A": to_b, "G_B": to_a, "D_A": of_b, "D_B": of_a}
        return latest_nets(networks, G_A="*_net_G[._][pA]*")  # G.pth or G_A.pth

    def translations(self) -> dict[str, Translation]:
        found = {}
        for name, which in (("AtoB", "to_b"), ("BtoA", "to_a")):
            network = self.generators[which]
            assert isinstance(network, ResnetGenerator)
            found[name] = of_generator(network)
        return found

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """Compare translations with their truth in 0..1, as the mean of both directions; without, as kinds."""
        fake_b, fake_a = self.translate(batch["a"], batch["b"])
        self.score_translations(batch, b=fake_b, a=fake_a)

    @torch.no_grad()
    def show(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        fake_b, fake_a = self.translate(batch["a"], batch["b"])
        again_b, again_a = self.translate(fake_a, fake_b)
        columns = {"a": batch["a"], "as b": fake_b, "a again": again_a, "truth b": batch.get("truth_b")}
        columns |= {"b": batch["b"], "as a": fake_a, "b again": again_b, "truth a": batch.get("truth_a")}
        return {title: pictures for title, pictures in columns.items() if pictures is not None}
