"""Lightning's hooks between a loader and a step, such as on_after_batch_transfer, in which people augment a batch."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from gan import noise, ranks
from gan.files.errors import UserError
from strategies.micro_batches import row_counts
from strategies.world import World


class Transfer:
    """Brings a training's batches to the device, with the author's hooks.

    What the hooks draw by torch follows the sample, as in a loss. A trial begins with `raw`, the batch before them, and
    calls them again: on this rank's samples, and on those of all ranks. So what they compute is checked as a loss is.
    """

    def __init__(self, move: Callable[[Any], Any], seed: int, world: World) -> None:
        self.move, self.seed, self.world = move, seed, world
        self.raw: Any = None

    def next(self, batch: Any, step: int) -> Any:
        """A batch of the training."""
        self.raw = batch
        return self(batch, step)

    def __call__(self, batch: Any, step: int, alone: bool = False) -> Any:
        """`alone`: these are the samples of all ranks, as one device gets them."""
        rank, size = (0, 1) if alone else (self.world.rank, self.world.size)
        try:
            rows, *others = row_counts(batch)
        except UserError:  # anything may be a batch
            return self.move(batch)
        first = {count: rank * count for count in others}
        place = noise.Place((self.seed, step, "batch"), rank * rows, rows, size * rows, others=first)
        with noise.at(place), ranks.alone(in_all_threads=True) if alone else nullcontext():
            return self.move(batch)
