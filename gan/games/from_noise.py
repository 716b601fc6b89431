"""What games that draw pictures from noise share: the same fakes at each validation, a score and a grid."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gan import GanModule, noise
from gan.files.errors import UserError

DIRECTIONS = 128
ACROSS = 8  # pictures in a row of a grid


class Compared(GanModule):
    """A game whose score is how far its pictures are from held-out pictures, as kinds of pictures.

    [Note: a distance over all ranks]
    A distance between distributions is not a mean over batches, so the projections of all ranks are gathered first.
    They are only a few numbers a picture.
    """

    def __init__(self) -> None:
        super().__init__()
        self._compared: list[tuple[Tensor, Tensor]] = []  # such as projections of drawn and of real pictures

    def compare(self, drawn: Tensor, real: Tensor) -> None:
        """Keep the projections of a batch's pictures, for the end of a validation."""
        self._compared.append((projections(drawn), projections(real)))

    def score_translations(self, batch: dict[str, Tensor], **fakes: Tensor) -> None:
        """Compare translations with their truth, in 0..1, as the mean of directions; without one, as kinds."""
        count = len(batch["a"])
        if "truth_b" not in batch:
            return self.compare(torch.cat(list(fakes.values())), torch.cat([batch[name] for name in fakes]))
        errors = [F.l1_loss(fake, batch[f"truth_{name}"]) / 2 for name, fake in fakes.items()]
        self.log("val/translation_error", torch.stack(errors).mean(), sync_dist=True, batch_size=count)

    def on_validation_epoch_end(self) -> None:
        if self._compared:
            kept = [self._of_all_ranks(torch.cat(each)).flatten(0, -2) for each in zip(*self._compared, strict=True)]
            self._compared.clear()
            self.log_compared(*kept)

    def log_compared(self, drawn: Tensor, real: Tensor) -> None:
        """The sliced Wasserstein distance between all pictures of the game and all held-out ones."""
        self.log("val/distance", wasserstein(drawn, real), sync_dist=True)


class FromNoise(Compared):
    """A game whose `drawer` makes pictures like {"image"} from vectors of noise, of length `drawer.latent`.

    If the drawer knows classes, so many as `drawer.classes`, batches have {"class"}: a number for each picture, or a
    vector. Then the drawer takes labels after the noise.

    The score is the distance of its fakes from held-out pictures. The grid shows fakes from always the same noise, and
    no pictures beside them, since a fake has no picture of its own.
    """

    class_names: Sequence[str] = ()  # of the data, for titles; a run on pictures sets them

    @property
    def drawer(self) -> Any:
        """The network that draws, with its `latent`. Override it in a game whose network is not called `generator`."""
        return self.generator

    def latents(self, like: Tensor) -> Tensor:
        """A vector of noise for each picture of a batch; the same sample gets the same noise on any rank."""
        return noise.randn((len(like), self._latent), like=like)

    @property
    def _latent(self) -> int:
        found = getattr(self.drawer, "latent", None)
        if found is None:
            raise UserError(f"{type(self.drawer).__name__} has no 'latent'; set it to the length of the noise it takes")
        return found

    def labels(self, batch: dict[str, Tensor]) -> Tensor | None:
        """The labels of a batch's pictures as vectors, with the dtype of the pictures."""
        if not (classes := getattr(self.drawer, "classes", 0)):
            return None
        if "class" not in batch:
            raise UserError(f"the networks know {classes} classes, and the pictures have none; take networks without")
        found = batch["class"]
        return (found if found.is_floating_point() else F.one_hot(found, classes)).to(batch["image"])

    def labels_of_fakes(self, batch: dict[str, Tensor]) -> Tensor | None:
        """The labels that fakes are drawn for: those of random samples, which the batch is."""
        return self.labels(batch)

    def draw(self, like: Tensor, labels: Tensor | None = None) -> Tensor:
        return self._drawn_from(self.latents(like), labels)

    def _drawn_from(self, latents: Tensor, labels: Tensor | None) -> Tensor:
        return self.drawer(latents) if labels is None else self.drawer(latents, labels)

    def numbered(self, numbers: Tensor, like: Tensor, labels: Tensor | None = None) -> Tensor:
        """The fakes with some numbers, the same ones each time. Without labels, the classes take turns."""
        latents = [noise_of(number, self._latent) for number in numbers.tolist()]
        if labels is None and (classes := getattr(self.drawer, "classes", 0)):
            labels = F.one_hot(numbers.to(like.device) % classes, classes).to(like)
        return self._drawn_from(torch.stack(latents).to(like), labels)

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """Compare pictures with as many fakes, numbered through all ranks: the same ones at any number of ranks."""
        image = batch["image"]
        rank, world = self.trainer.global_rank, self.trainer.world_size
        before = sum(len(drawn) for drawn, _ in self._compared)
        first = before * world + rank * len(image)  # as the pictures of a batch are dealt out
        numbers = first + torch.arange(len(image))
        self.compare(self.numbered(numbers, image, self.labels(batch)), image)

    def shown_numbers(self, rows: int) -> dict[str, Tensor]:
        """The columns of a grid with so many rows: the numbers of fakes. A column has one class."""
        classes = getattr(self.drawer, "classes", 0) or 1
        step = classes * max(1, ACROSS // classes)
        found = {k: k + step * torch.arange(rows) for k in range(min(ACROSS, step))}
        if classes > 1:
            names = [
                f"class {name}" if name.isdecimal() else name for name in self.class_names or map(str, range(classes))
            ]
            return {f"{names[k % classes]}: seeds {k}, …": each for k, each in found.items()}
        return {f"seeds {k}, {k + step}, …": each for k, each in found.items()}

    @torch.no_grad()
    def show(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rows of the first fakes by their numbers, as many as the batch has pictures."""
        image = batch["image"]
        return {title: self.numbered(each, image) for title, each in self.shown_numbers(len(image)).items()}


def noise_of(number: int, length: int) -> Tensor:
    """The vector of noise of the fake with that number."""
    return torch.randn(length, generator=torch.Generator().manual_seed(noise.seed_for("fake", number)))


def projections(images: Tensor) -> Tensor:
    """Pictures projected on fixed random directions, at three sizes: [B, 3 * DIRECTIONS]."""
    generator = torch.Generator().manual_seed(0)
    seen = []
    for shrink in (1, 2, 4):
        pixels = F.avg_pool2d(images, shrink).flatten(1)
        directions = torch.randn(pixels.shape[1], DIRECTIONS, generator=generator).to(pixels)
        seen.append(pixels @ F.normalize(directions, dim=0))
    return torch.cat(seen, 1)


def wasserstein(one: Tensor, other: Tensor) -> Tensor:
    """The distance between two equally large sets of projections, as the mean over the directions."""
    # Sliced Wasserstein distance of Rabin et al. 2011: on a line, the best transport pairs the sorted values.
    return (one.sort(0).values - other.sort(0).values).abs().mean()
