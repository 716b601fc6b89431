"""A small game that draws pictures of classes from noise, and its data: for scores and health while it trains."""

from functools import partial

import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import Dataset
from torchvision import tv_tensors

from datasets import GanData
from gan import Phase, Player, noise
from gan.app.scoring.outputs import Judged, Made, judges, makes
from gan.games.from_noise import FromNoise
from gan.losses import non_saturating_discriminator, non_saturating_generator
from gan.runs import Run

CLASSES, SIDE = 3, 4


class Squares(Dataset):
    """Pictures of noise, brighter in the higher of the classes."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> dict:
        dice = torch.Generator().manual_seed(noise.seed_for(self.seed, number))
        pixels = torch.randint(0, 100, (3, SIDE, SIDE), generator=dice) + 60 * (number % CLASSES)
        return {"image": tv_tensors.Image(pixels.byte()), "class": number % CLASSES}


class Labelled(FromNoise):
    """One linear layer a player. Both are told the class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.generator = nn.Linear(5 + CLASSES, 3 * SIDE * SIDE)
        self.discriminator = nn.Linear(3 * SIDE * SIDE + CLASSES, 1)

    def configure_players(self):
        yield Player("generator", self.generator, partial(SGD, lr=0.1), ema=0.5)
        yield Player("discriminator", self.discriminator, partial(SGD, lr=0.1))

    def configure_phases(self):
        yield Phase("discriminator", self.judge, "discriminator")
        yield Phase("generator", self.fool, "generator")

    def classes(self, batch):
        return torch.nn.functional.one_hot(batch["class"], CLASSES).to(batch["image"])

    def drawn(self, batch):
        latents = noise.randn((len(batch["class"]), 5), like=batch["image"])
        pictures = self.generator(torch.cat([latents, self.classes(batch)], 1)).tanh()
        return pictures.view(-1, 3, SIDE, SIDE)

    def scored(self, pictures, batch):
        return self.discriminator(torch.cat([pictures.flatten(1), self.classes(batch)], 1))

    def judge(self, batch):
        fake = self.drawn(batch).detach()
        return non_saturating_discriminator(self.scored(batch["image"], batch), self.scored(fake, batch))

    def fool(self, batch):
        return non_saturating_generator(self.scored(self.drawn(batch), batch))

    def validation_step(self, batch):
        self.log("val/error", self.drawn(batch).mean(), sync_dist=True)

    def on_validation_epoch_end(self):
        """There is no other score."""


@makes.register
def _labelled(game: Labelled, batch: dict, numbers: torch.Tensor) -> dict[str, Made]:
    return {"drawn": Made(game.drawn(batch), batch["image"], paired=False)}


@judges.register
def _judges_labelled(game: Labelled, batch: dict) -> Judged:
    fakes = game.drawn(batch)
    return Judged(game.scored(batch["image"], batch), game.scored(fakes, batch), batch["image"], fakes)


def run(train: int = 40, held_out: int = 12) -> Run:
    """The game and its data, eight samples a batch."""
    data = GanData(Squares(train, 0), Squares(held_out, 1), batch_size=8, flip=False)
    return Run(Labelled(), data, 6, {"val/error": "error"})
