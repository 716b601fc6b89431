"""Is a run well? Whether its discriminator learns by heart, one player has won, or the fakes are all alike."""

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate
from tqdm import tqdm

from datasets.augment import Prepared
from gan import noise, ranks
from gan.app.fitting.metrics import RANGES, log
from gan.app.fitting.pace import computing
from gan.app.run.reopen import has_numbers
from gan.app.scoring.outputs import Judged, judges
from strategies.strategy import phase_strategy

PICTURES = 64  # of each kind, at least, for a measurement
TIMES = 200  # measurements of a whole run, at most
APART = 50  # steps between two of them, at least: then they cost little
WHILE = 5  # measurements whose median must be out of its range, before there is advice
SIDE = 16  # pixels: the size at which pictures are compared with each other

# What to say outside of the RANGES in which a run is well; `ways` has what to do.
ADVICE = {
    "memorised": (
        "the discriminator scores training pictures above held-out ones in {:.0%} of pairs, and 50 % is right: it "
        "learns them by heart; {}"
    ),
    "told_apart": (
        "the discriminator tells fakes apart in {:.0%} of pairs, and 50 % is guessing; if the pictures are not good, {}"
    ),
    "diversity": (
        "fakes differ from each other by {:.0%} of what pictures do, and 100 % is right: the generator has collapsed "
        "or runs away; {}"
    ),
}


def ways(game: Any) -> dict[str, list[str]]:
    """What can be done with a game: names only what it has."""
    weights = [name for name in ("gamma", "penalty") if hasattr(game, name)]
    augments = hasattr(game, "ada") or hasattr(game, "augment")
    own_rate = hasattr(game, "discriminator_rate") or hasattr(game, "rates")
    lower = [*["raise its learning rate"] * own_rate, *(f"lower {weight}" for weight in weights)]
    rest = ["lower the learning rates", "go back to an earlier checkpoint"]
    return {
        "memorised": [*["augment more"] * augments, "give it more pictures"],
        "told_apart": lower or ["make it wider"],
        "diversity": [*(f"raise {weight}" for weight in weights), *rest],
    }


class Health(Callback):
    """Measures now and then how the players are doing, for metrics.csv, and gives a line of advice.

    ADVICE says what is measured; and `augmented`, the probability of augmentation, where a game has such a buffer `p`.
    A game whose discriminator is not known to `judges` is not measured, nor one whose samples have no numbers.
    """

    def __init__(self, steps: int) -> None:
        self.every = max(APART, -(-steps // TIMES))
        self.seen: dict[str, deque[float]] = {name: deque(maxlen=WHILE) for name in RANGES}
        self.said: set[str] = set()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        data = getattr(trainer, "datamodule", None)
        if trainer.global_step % self.every or not has_numbers(data):
            return
        found = self.measured(trainer, pl_module, data)
        if trainer.is_global_zero and found:
            log(trainer, {f"health/{name}": value for name, value in found.items()})
            for advice in self.advice(found, pl_module):
                tqdm.write(f"step {trainer.global_step}: {advice}")

    def measured(self, trainer: Trainer, game: Any, data: Any) -> dict[str, float]:
        """The figures, the same at any number of ranks: each rank plays its part of the same global batches."""
        world, step, batch = phase_strategy(trainer).world, trainer.global_step, data.batch_size
        turns = max(1, PICTURES // batch)
        numbers = {"train": self._numbers(data.train, step, batch * turns)}
        numbers["held out"] = self._numbers(data.val, step, batch * turns)
        share = batch // world.size
        kept: dict[str, list[Judged]] = {kind: [] for kind in numbers}
        with computing(trainer, game, "health", self.every, averaged=False) as prepared:
            for turn in range(turns):
                place = noise.Place(("health", step, turn), world.rank * share, share, batch)
                own = slice(turn * batch + place.first, turn * batch + place.first + share)
                for kind, samples in (("train", data.train), ("held out", data.val)):
                    # Read before the place is set: what a data set draws would count as draws of the game.
                    items = prepared(default_collate([Prepared(samples)[0, number] for number in numbers[kind][own]]))
                    with noise.at(place):
                        judged = judges(game, items)
                    if judged is None:
                        return {}
                    kept[kind].append(judged)

        def all_of(what: str, kind: str = "train") -> Tensor:
            return torch.cat([ranks.gather(getattr(each, what).float()) for each in kept[kind]])

        real = all_of("real")
        found = {
            "told_apart": above(real, all_of("fake")),
            "memorised": above(real, all_of("real", "held out")),
            "diversity": differences(all_of("fakes")) / differences(all_of("pictures")),
        }
        augmented = [value for name, value in game.named_buffers() if name.endswith(".p") and value.numel() == 1]
        return {**found, **dict(zip(["augmented"], map(float, augmented), strict=False))}

    def _numbers(self, samples: Any, step: int, count: int) -> list[int]:
        """Numbers of samples, others at each step; each once if there are enough."""
        dice = torch.Generator().manual_seed(noise.seed_for("health", step))
        order = torch.randperm(len(samples), generator=dice).tolist()
        return [order[place % len(order)] for place in range(count)]

    def advice(self, found: Mapping[str, float], game: Any) -> list[str]:
        """What to say about figures that are out of their range for a while; each thing once."""
        lines = []
        for name, (least, most) in RANGES.items():
            seen = self.seen[name]
            seen.append(found[name])
            if len(seen) == WHILE and name not in self.said and not least <= median(seen) <= most:
                self.said.add(name)
                lines.append(ADVICE[name].format(median(seen), ", or ".join(ways(game)[name])))
        return lines


def above(some: Tensor, others: Tensor) -> float:
    """In how many pairs of scores the one is above the other; equal ones count half."""
    pairs = some.flatten()[:, None] - others.flatten()
    return float(((pairs > 0).double() + 0.5 * (pairs == 0)).mean())


def differences(pictures: Tensor) -> float:
    """The mean difference between two of these pictures, root mean square, at a small size."""
    small = F.interpolate(pictures, (SIDE, SIDE), mode="area").flatten(1).double()
    return float(torch.pdist(small).mean().clamp_min(1e-12))
