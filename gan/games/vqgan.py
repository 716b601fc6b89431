"""VQGAN, Esser et al. 2021: pictures as small maps of codes, painted again by a decoder that must also look true."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam

from gan import GanModule, Phase, Player, ranks
from gan.games.translation import Translation, of_autoencoder
from gan.losses import hinge_discriminator, hinge_generator, non_saturating_discriminator
from nets.discriminator import PatchGan
from nets.published.files import PublishedFile
from nets.vgg import Lpips
from nets.vqgan import VqAutoencoder

LARGEST = 1e4  # of the adaptive weight
FINER = 2**12  # gradients are this much larger while they are computed, so that half precision does not lose them


class VqGan(GanModule):
    """Learns to paint {"image"} again from the numbers of a few codes.

    For the first `start` steps it learns only to paint the pixels, and what `perceptual` sees in them; then the
    discriminator joins the game. The weight of its judgement is adaptive: at the decoder's last layer, it pulls
    `adversarial` times as much as the rest does. The discriminator's loss is "hinge" or "vanilla".

    As published, the discriminator sees pictures before `start` too: its running statistics follow them, and Adam
    counts these steps, in which it learns nothing.
    """

    def __init__(
        self,
        autoencoder: VqAutoencoder,
        discriminator: PatchGan,
        perceptual: Lpips | None = None,
        *,
        rate: float,
        start: int,
        adversarial: float = 0.8,
        loss: str = "hinge",
        perceptual_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.autoencoder, self.discriminator, self.perceptual = autoencoder, discriminator, perceptual
        self.rate, self.start, self.adversarial = rate, start, adversarial
        self.loss, self.perceptual_weight = loss, perceptual_weight
        self._used: list[Tensor] = []

    def configure_players(self) -> Iterator[Player]:
        adam = partial(Adam, lr=self.rate, betas=(0.5, 0.9), fused=True)
        yield Player("autoencoder", self.autoencoder, adam)
        yield Player("discriminator", self.discriminator, adam)

    def configure_phases(self) -> Iterator[Phase]:
        """The adaptive weight differentiates the losses at the decoder's last layer: hence `second_order`."""
        yield Phase("autoencoder", self.paint, "autoencoder", second_order=True)
        yield Phase("discriminator", self.judge, "discriminator")

    @property
    def joined(self) -> bool:
        """Whether the discriminator has joined the game."""
        return self.step >= self.start

    def paint(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Paint the picture, with features that are near their codes, and please the discriminator."""
        painted, codebook, _ = self.autoencoder(batch["image"])
        picture = painted.detach().to(batch["image"].dtype).requires_grad_()
        losses = self.difference(picture, batch["image"])
        with torch.set_grad_enabled(self.joined):
            score = hinge_generator(self.discriminator(picture))
        losses = {name: carried(loss, picture, painted) for name, loss in losses.items()}
        if self.joined:
            score = carried(score, picture, painted)
            score = self.adversarial * self.balance(losses["pixels"] + losses.get("perceptual", 0.0), score) * score
        return losses | {"codebook": codebook, "adversarial": score if self.joined else 0.0 * score}

    def difference(self, painted: Tensor, image: Tensor) -> dict[str, Tensor]:
        """How far pictures are from what is painted of them."""
        losses = {"pixels": F.l1_loss(painted, image)}
        if self.perceptual is not None:
            losses["perceptual"] = self.perceptual_weight * self.perceptual(image, painted).mean()
        return losses

    def judge(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Tell the picture from what is painted of it."""
        with torch.no_grad():
            painted, _, _ = self.autoencoder(batch["image"], follow=False)
        compare = {"hinge": hinge_discriminator, "vanilla": non_saturating_discriminator}[self.loss]
        scores = self.discriminator(batch["image"]), self.discriminator(painted)
        return {self.loss: 0.5 * self.joined * compare(*scores)}

    def balance(self, difference: Tensor, score: Tensor) -> Tensor:
        """The adaptive weight: how much longer the difference's gradient is than the score's.

        It is no mean over samples. So the gradients are those of the global batch: their mean over all ranks.
        """
        # Esser et al. 2021, equation 7.
        last = self.autoencoder.decoder.conv_out.weight
        of_difference, of_score = (
            ranks.mean(torch.autograd.grad(loss, last, retain_graph=True)[0]).norm() for loss in (difference, score)
        )
        return (of_difference / (of_score + 1e-4)).clamp_max(LARGEST)

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """Log the difference between pictures and what is painted of them, in 0..1, and note which codes are used."""
        image = batch["image"]
        painted, _, numbers = self.autoencoder(image)
        found = {"paint_error": F.l1_loss(painted, image) / 2}
        if self.perceptual is not None:
            found["lpips"] = self.perceptual(image, painted).mean()
        for name, value in found.items():
            self.log(f"val/{name}", value, sync_dist=True, batch_size=len(image))
        self._used.append(numbers.flatten().bincount(minlength=self.autoencoder.quantize.size))

    def on_validation_epoch_end(self) -> None:
        """Log the share of the codebook that is idle: 1 minus the perplexity of the codes of all ranks, per code."""
        used = self._of_all_ranks(torch.stack(self._used).sum(0)).view(-1, len(self._used[0])).sum(0)
        self._used = []
        share = used / used.sum()
        perplexity = torch.special.entr(share).sum().exp()
        self.log("val/idle_codes", 1 - perplexity / len(share), sync_dist=True)

    def translations(self) -> dict[str, Translation]:
        """What `gan.sample --inputs` makes of a picture; its codes, and the picture of codes."""
        return of_autoencoder(self.autoencoder)

    def published(self) -> list[PublishedFile]:
        networks = {"": self.autoencoder, "loss.discriminator.main.": self.discriminator.model}
        return [PublishedFile("last.ckpt", networks, "*.ckpt", within="state_dict")]

    @torch.no_grad()
    def show(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A row a sample: the picture, the map of its codes, each with a colour of its own, and what is painted."""
        image = batch["image"]
        painted, _, numbers = self.autoencoder(image)
        block = 2**self.autoencoder.halvings
        codes = numbers.repeat_interleave(block, 1).repeat_interleave(block, 2)
        return {"picture": image, "codes": codes[:, : image.shape[2], : image.shape[3]], "output": painted}


def carried(loss: Tensor, picture: Tensor, painted: Tensor) -> Tensor:
    """A loss of `picture` as one of `painted`, which has the same values.

    The gradient is computed down to the picture, once. The adaptive weight and the backward both go on from there; in
    the published code each goes through the discriminator and LPIPS again.
    """
    slope = torch.autograd.grad(loss, picture, torch.full_like(loss, FINER))[0] / FINER
    return loss.detach() + ((painted - painted.detach()).to(slope.dtype) * slope).sum()
