"""SEAN, Zhu et al. 2020: a picture from a mask and a style code for each region."""

from typing import Any

import torch
from torch import Tensor

from gan import noise
from gan.games.spade import Spade
from nets.discriminator import MultiScaleDiscriminator
from nets.published.files import PublishedFile
from nets.published.sean import discriminator_file, generator_file
from nets.sean.generator import SeanGenerator, StyleEncoder
from nets.vgg import Vgg19


class Sean(Spade):
    """Learns to repaint a picture from its own mask and styles, and so to paint any mask in any styles.

    It is SPADE with styles: the same turns and losses, and an encoder that learns with the generator. For validation
    a batch may also have what a transfer should give: {"style_image", "style_label", "truth"}, and {"region",
    "region_truth"} for a transfer of one region's style only.
    """

    painters = ("encoder", "generator")

    def __init__(
        self,
        encoder: StyleEncoder,
        generator: SeanGenerator,
        discriminator: MultiScaleDiscriminator,
        vgg: Vgg19 | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(generator, discriminator, vgg, **settings)
        self.encoder = encoder

    def repaint(self, image: Tensor, mask: Tensor) -> Tensor:
        """Paint a picture again from its mask and its own styles."""
        return self.generator(mask, self.styles(image, mask))

    def styles(self, image: Tensor, mask: Tensor) -> Tensor:
        return self.encoder(image, mask[:, : self.labels])

    def transfer(self, batch: dict[str, Tensor]) -> Tensor:
        """The shapes of "label" in the styles of "style_image", or in the picture's own where there is none."""
        mask = self.mask(batch["label"], batch.get("edges"))
        if "style_image" not in batch:
            return self.repaint(batch["image"], mask)
        return self.generator(mask, self.styles(batch["style_image"], self.mask(batch["style_label"])))

    def restyle(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The picture in its own styles, and the same with only the style of "region" taken from "style_image"."""
        mask, region = self.mask(batch["label"], batch.get("edges")), batch["region"]
        own = self.styles(batch["image"], mask)
        other = self.styles(batch["style_image"], self.mask(batch["style_label"]))
        row = torch.arange(len(own), device=own.device)
        changed = own.index_put((row, region), other[row, region])
        # Both have the same noise, so that only the style makes a difference.
        return self.grained(mask, own), self.grained(mask, changed)

    def grained(self, mask: Tensor, codes: Tensor) -> Tensor:
        """The generator's picture with noise that is the same in every call."""
        with noise.at(noise.Place(("grain",), 0, len(mask), len(mask))):
            return self.generator(mask, codes)

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        label, style_label = batch["label"], batch.get("style_label", batch["label"])

        # The whole picture, but only regions that the style's picture has.
        error = (self.transfer(batch) - batch.get("truth", batch["image"])).abs().mean(1) / 2
        present = self.mask(style_label)[:, : self.labels].flatten(2).amax(2)
        known = present.gather(1, label.flatten(1)).view_as(label)
        error = (error * known).sum() / known.sum().clamp_min(1)
        self.log("val/transfer_error", error, sync_dist=True, batch_size=len(label))

    @torch.no_grad()
    def show(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A row a sample: the shape, where the styles come from, the output and the truth."""
        style, truth = batch.get("style_image", batch["image"]), batch.get("truth", batch["image"])
        columns = {"shape": batch["label"], "style": style, "output": self.transfer(batch), "truth": truth}
        if "region" in batch:
            columns |= {"one region": self.restyle(batch)[1], "its truth": batch["region_truth"]}
        return columns

    def published(self) -> list[PublishedFile]:
        return [generator_file(self.encoder, self.generator), discriminator_file(self.discriminator)]
