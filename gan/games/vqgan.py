"""VQGAN, Esser et al. 2021: pictures as small maps of codes, painted again by a decoder that must also look true."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam

from gan import GanModule, Phase, Player, ranks
from gan.losses import hinge_discriminator, hinge_generator
from nets.discriminator import PatchDiscriminator
from nets.vqgan import VqAutoencoder

LARGEST = 1e4  # of the adaptive weight


class VqGan(GanModule):
    """Learns to paint {"image"} again from the numbers of a few codes.

    For the first `start` steps it learns only to paint the pixels; then the discriminator joins the game. The weight of
    its judgement is adaptive: at the decoder's last layer, it pulls `adversarial` times as much as the pixels do. The
    codes learn by a moving average. The published perceptual loss is left out, since it needs weights to download;
    L1 is alone.
    """

    def __init__(
        self,
        autoencoder: VqAutoencoder,
        discriminator: PatchDiscriminator,
        *,
        rate: float = 1e-3,
        start: int = 250,
        adversarial: float = 0.8,
        commitment: float = 0.25,
    ) -> None:
        super().__init__()
        self.autoencoder, self.discriminator = autoencoder, discriminator
        self.rate, self.start, self.adversarial, self.commitment = rate, start, adversarial, commitment
        self._used: list[Tensor] = []

    def configure_players(self) -> Iterator[Player]:
        adam = partial(Adam, lr=self.rate, betas=(0.5, 0.9))
        yield Player("autoencoder", self.autoencoder, adam)
        yield Player("discriminator", self.discriminator, adam)

    def configure_phases(self) -> Iterator[Phase]:
        """The adaptive weight differentiates the losses at the decoder's last layer: hence `second_order`."""
        yield Phase("reconstruction", self.reconstruct, "autoencoder", until=self.start)
        yield Phase("autoencoder", self.fool, "autoencoder", start=self.start, second_order=True)
        yield Phase("discriminator", self.judge, "discriminator", start=self.start)

    def reconstruct(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Paint the picture's pixels, with features that stay near their codes."""
        painted, features, codes = self.shared("painted", self.autoencoder, batch["image"])
        # Esser et al. 2021, equation 4. Its second term, which moves the codes, is the codebook's moving average.
        return {
            "pixels": F.l1_loss(painted, batch["image"]),
            "commitment": self.commitment * F.mse_loss(features, codes),
        }

    def fool(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same, and please the discriminator."""
        losses = self.reconstruct(batch)
        painted, _, _ = self.shared("painted", self.autoencoder, batch["image"])
        score = hinge_generator(self.discriminator(painted)[-1])
        return losses | {"adversarial": self.adversarial * self.balance(losses["pixels"], score) * score}

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tell the picture from what was painted of it."""
        painted, _, _ = self.shared("painted", self.autoencoder, batch["image"])
        scores = self.discriminator(batch["image"])[-1], self.discriminator(painted.detach())[-1]
        return {"hinge": hinge_discriminator(*scores)}

    def balance(self, pixels: Tensor, score: Tensor) -> Tensor:
        """The adaptive weight: how much longer the pixels' gradient is than the score's.

        It is no mean over samples. So the gradients are those of the global batch: their mean over all ranks.
        """
        # Esser et al. 2021, equation 7.
        last = self.autoencoder.paint.weight
        of_pixels, of_score = (
            ranks.mean(torch.autograd.grad(loss, last, retain_graph=True)[0]).norm() for loss in (pixels, score)
        )
        return (of_pixels / (of_score + 1e-6)).clamp_max(LARGEST)

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """Log the difference between pictures and what is painted of them, in 0..1, and note which codes are used."""
        image = batch["image"]
        error = F.l1_loss(self.autoencoder(image)[0], image) / 2
        self.log("val/paint_error", error, sync_dist=True, batch_size=len(image))
        numbers = self.autoencoder.numbers(image)
        self._used.append(numbers.flatten().bincount(minlength=len(self.autoencoder.codebook.counts)))

    def on_validation_epoch_end(self) -> None:
        """Log the share of the codebook that is idle: 1 minus the perplexity of the codes of all ranks, per code."""
        used = self._of_all_ranks(torch.stack(self._used).sum(0)).view(-1, len(self._used[0])).sum(0)
        self._used = []
        share = used / used.sum()
        perplexity = torch.special.entr(share).sum().exp()
        self.log("val/idle_codes", 1 - perplexity / len(share), sync_dist=True)

    @torch.no_grad()
    def show(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A row a sample: the picture, the map of its codes, each with a colour of its own, and what is painted."""
        image = batch["image"]
        numbers = self.autoencoder.numbers(image)
        blocks = [image.shape[side] // numbers.shape[side - 1] for side in (2, 3)]
        codes = numbers.repeat_interleave(blocks[0], 1).repeat_interleave(blocks[1], 2)
        return {"picture": image, "codes": codes, "output": self.autoencoder(image)[0]}
