"""BigGAN, Brock, Donahue and Simonyan 2019: pictures of classes, by large networks and large batches."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from gan import Phase, Player, noise
from gan.games.from_noise import FromNoise
from gan.losses import hinge_generator
from nets.biggan import BigGanDiscriminator, BigGanGenerator
from nets.published.files import PublishedFile

Pair = tuple[float, float]  # what holds for the generator, and for the discriminator


class BigGan(FromNoise):
    """Learns to draw pictures like {"image"}, of classes {"class"} if the networks know any.

    The discriminator learns in every step and the generator in one of `judgements`, each with fakes of random classes.
    From its update number `ema_start` on the generator's weights and buffers are averaged. `orthogonal` is the weight
    of a penalty on rows of a weight that are alike, in the generator and in the discriminator.
    """

    def __init__(
        self,
        generator: BigGanGenerator,
        discriminator: BigGanDiscriminator,
        *,
        rates: Pair = (2e-4, 2e-4),
        judgements: int = 4,
        orthogonal: Pair = (0.0, 0.0),
        ema: float = 0.9999,
        ema_start: int = 1000,
        epsilon: float = 1e-8,
    ) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.rates, self.judgements, self.orthogonal = rates, judgements, orthogonal
        self.ema, self.ema_start, self.epsilon = ema, ema_start, epsilon

    def configure_players(self) -> Iterator[Player]:
        """No momentum. Samples come from the generator's averaged weights and statistics."""
        adams = [partial(Adam, lr=rate, betas=(0.0, 0.999), eps=self.epsilon) for rate in self.rates]
        yield Player("generator", self.generator, adams[0], ema=self.decay, ema_buffers="averaged")
        yield Player("discriminator", self.discriminator, adams[1])

    def configure_phases(self) -> Iterator[Phase]:
        """The discriminator's turn comes first, and more often."""
        yield Phase("discriminator", self.judge, "discriminator")
        yield Phase("generator", self.fool, "generator", every=self.judgements, start=self.judgements - 1)

    def decay(self, updates: int) -> float:
        """The decay of the generator's average: until `ema_start` it is the generator itself."""
        return 0.0 if updates + 1 < self.ema_start else self.ema

    def labels_of_fakes(self, batch: dict[str, Tensor]) -> Tensor | None:
        """Random classes, each as likely as the others."""
        if not (classes := self.generator.classes):
            return None
        image = batch["image"]
        return F.one_hot(noise.randint(0, classes, (len(image),), like=image).long(), classes).to(image)

    def fakes(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """New fakes, and their labels."""
        latents = self.latents(batch["image"])
        labels = self.labels_of_fakes(batch)
        return self._drawn_from(latents, labels), labels

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tell fakes from pictures, which the discriminator sees together."""
        with torch.no_grad():
            fake, labels = self.fakes(batch)
        own = self.labels(batch)
        both = None if labels is None or own is None else torch.cat([labels, own])
        on_fake, on_real = self.discriminator(torch.cat([fake, batch["image"]]), both).split(len(fake))
        found = {"real": (1 - on_real).relu().mean(), "fake": (1 + on_fake).relu().mean()}
        return found | self.penalty(self.discriminator, self.orthogonal[1])

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Please the discriminator."""
        fake, labels = self.fakes(batch)
        found = {"adversarial": hinge_generator(self.discriminator(fake, labels))}
        return found | self.penalty(self.generator, self.orthogonal[0])

    def penalty(self, network: nn.Module, strength: float) -> dict[str, Tensor]:
        """How alike the rows of each weight are. The published code leaves the generator's embedding out."""
        if not strength:
            return {}
        named = network.named_parameters()
        weights = [each.flatten(1) for name, each in named if each.dim() > 1 and not name.startswith("shared.")]
        # Its gradient is that of the published code, which adds 2 strength ((W W^T) (1 - I)) W to gradients.
        alike = [(weight @ weight.T).fill_diagonal_(0).square().sum() for weight in weights]
        return {"orthogonal": 0.5 * strength * torch.stack(alike).sum()}

    def published(self) -> list[PublishedFile]:
        """Where a folder has both, the generator as it was trained is read, and not its average."""
        networks = {"G_ema": self.generator, "G": self.generator, "D": self.discriminator}
        return [PublishedFile(f"{name}.pth", {"": network}, f"{name}_copy*.pth") for name, network in networks.items()]
