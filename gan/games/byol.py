"""BYOL, Grill et al. 2020: representations from pictures without labels, learned from one's own moving average."""

import copy
import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from gan import Phase, Player
from gan.games.from_noise import Compared
from nets.blocks import onehot
from nets.byol import Online, random_view

VOTES = 10  # nearest neighbours that guess a sample's attributes
RARE = 0.05  # the least share of samples that must have an attribute, and must lack it, for it to be scored


class Byol(Compared):
    """Learns what two views of a picture {"image"} have in common.

    From one view, the online network with its predictor predicts the target network's projection of the other view. The
    target is the online network's moving average. Nothing keeps different pictures apart, and yet they do not fall
    together. `steps` is the length of the training, at whose end the target stands still.

    The score needs samples with {"label"}: which labels a picture has is guessed from the pictures whose
    representations are nearest.
    """

    def __init__(
        self, online: Online, predictor: nn.Module, *, labels: int, steps: int, rate: float = 1e-3, decay: float = 0.996
    ) -> None:
        super().__init__()
        self.online, self.predictor, self.target = online, predictor, copy.deepcopy(online)
        self.labels, self.steps, self.rate, self.decay = labels, steps, rate, decay

    def configure_players(self) -> Iterator[Player]:
        """The published optimizer, LARS, is for batches of thousands of pictures."""
        adam = partial(Adam, lr=self.rate, fused=True)
        yield Player("online", self.online, adam)
        yield Player("predictor", self.predictor, adam)
        yield Player("target", self.target, follows="online", ema=partial(rising, self.decay, self.steps))

    def configure_phases(self) -> Iterator[Phase]:
        yield Phase("online", self.predict, ("online", "predictor"))

    def predict(self, batch: dict[str, Tensor]) -> Tensor:
        """Predict from each of two views what the target makes of the other one."""
        one, other = random_view(batch["image"]), random_view(batch["image"])
        self.target.train()  # as published, its batch norms take the statistics of the batch
        with torch.no_grad():
            of_one, of_other = self.target(one), self.target(other)
        guesses = self.predictor(self.online(one)), self.predictor(self.online(other))
        return distance(guesses[0], of_other) + distance(guesses[1], of_one)

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        present = onehot(batch["label"], self.labels, like=batch["image"]).amax((2, 3))
        self._compared.append((self.online.encoder(batch["image"]), present))

    def log_compared(self, seen: Tensor, present: Tensor) -> None:
        self.log("val/neighbour_error", neighbour_error(seen, present), sync_dist=True)

    @torch.no_grad()
    def show(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        image = batch["image"]
        return {"picture": image, "a view": random_view(image), "another view": random_view(image)}


def distance(guess: Tensor, target: Tensor) -> Tensor:
    """The squared distance of the directions of two vectors."""
    # Grill et al. 2020, equation 2.
    return (2 - 2 * F.cosine_similarity(guess, target)).mean()


def rising(decay: float, steps: int, update: int) -> float:
    """The target's decay after so many updates: it rises from `decay` to 1."""
    # Grill et al. 2020, section 3.3.
    return 1 - (1 - decay) * (math.cos(math.pi * min(update / steps, 1)) + 1) / 2


def neighbour_error(seen: Tensor, present: Tensor) -> Tensor:
    """How badly the attributes [N, A] of a sample are guessed from those with the nearest representations [N, D].

    The guess is the mean of its nearest others (Wu et al. 2018, without weights). Its squared error is divided by that
    of a guess that knows nothing, the mean of all: so 1 is chance. Attributes count alike.
    """
    share = present.mean(0)
    present = present[:, (share >= RARE) & (share <= 1 - RARE)]
    directions = F.normalize(seen - seen.mean(0))
    likeness = (directions @ directions.T).fill_diagonal_(-2)
    guess = present[likeness.topk(min(VOTES, len(seen) - 1)).indices].mean(1)
    return ((guess - present).square().mean(0) / present.var(0, correction=0)).mean()
