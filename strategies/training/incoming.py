"""A batch on its way to a step: through the author's hooks, onto the device, and in one form on all ranks."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

from torch import Tensor

from gan import noise
from gan.files.errors import UserError
from strategies.batches import random_state
from strategies.batches.draws import Draws
from strategies.batches.micro_batches import not_clear, tensors
from strategies.check.one_process import as_one_process
from strategies.hooks import AFTER
from strategies.processes.whereabouts import Whereabouts
from strategies.sharding.resharded_parameter import version_of
from strategies.turn import Training
from strategies.world import agree


class Incoming:
    """Brings each batch to its step. `to_device` is how Lightning moves a batch, with the author's hooks around it."""

    def __init__(self, training: Training, whereabouts: Whereabouts, to_device: Callable[..., Any]) -> None:
        self.training, self.whereabouts, self.to_device = training, whereabouts, to_device
        self.game, self.batches = training.game, training.batches
        # If the author has hooks around it: the batch before them, and the place at which they draw.
        self.raw: Any = None
        self.place: noise.Place | None = None
        self.moved: list[tuple[Tensor, int]] = []  # the tensors of the batch that is to be played, and their versions
        self.met = False  # whether ranks have told each other of their lists

    def take(self, batch: Any, *where: Any) -> Any:
        """Bring the next batch to the device, and note it as it comes there."""
        self.training.world.owed.catch_up()
        self.batches.learn_lists(batch, self.batches.samples)
        if self.training.hooks.of_batches:
            self._same_dice()
            self.raw, batch = batch, self.by_sample(batch, self.training.draws)
            self.batches.learn_lists(batch, self.batches.samples)
        else:
            batch = self.to_device(batch, *where)
        if self.training.world.size > 1:
            self.moved = [(each, version_of(each)) for each in tensors(batch)]
        return batch

    def by_sample(self, batch: Any, draws: Draws, alone: bool = False) -> Any:
        """Bring a batch to the device, with the author's hooks, whose draws by torch follow the sample, as in a loss.

        A trial begins with the batch before the hooks, and calls them again: on this rank's samples, and `alone` on
        those of all ranks, as one device gets them. So what they compute is checked as a loss is.
        """
        world, step = self.training.world, self.game.step
        rank, size = (0, 1) if alone else (world.rank, world.size)
        draws.begin(AFTER)
        self.place = None
        try:
            rows, *others = self.batches.row_counts(batch)
        except UserError:  # anything may be a batch
            return self.to_device(batch)
        first = {count: rank * count for count in others}
        key, known = (self.training.seed, step, "batch"), draws.of(AFTER)
        self.place = noise.Place(key, rank * rows, rows, size * rows, others=first, **known)
        with noise.at(self.place), as_one_process(self.game.trainer) if alone else nullcontext():
            return self.to_device(batch)

    def before_hooks(self, batch: Any) -> Any:
        """The batch with which a trial begins."""
        return self.raw if self.training.hooks.of_batches else batch

    def refuse_changed(self, batch: Any) -> None:
        """Refuse what on_train_batch_start does to a batch: a trial begins after it."""
        self.training.world.owed.catch_up()
        now = tensors(batch)
        same = len(now) == len(self.moved) and all(each is old for each, (old, _) in zip(now, self.moved, strict=True))
        if self.moved and not (same and all(version_of(each) == version for each, version in self.moved)):
            raise UserError(
                "on_train_batch_start changes the batch: what it draws or computes is each rank's own, and no trial "
                "sees it; write on_after_batch_transfer(batch, dataloader_idx) in its place, or do it in the loss"
            )
        self.moved = []  # it would keep the batch in memory until the next one is there

    def agree(self, batch: Any) -> None:
        """A step begins: see that all ranks have the same dice, and read their batches in the same way."""
        self._same_dice()
        world, last = self.training.world, self.game.trainer.is_last_batch  # which may be a smaller one
        if world.size > 1 and not self.met:
            self.whereabouts.begin_step(self.game.step)
            with self.whereabouts.named():
                for each in world.gather(self.batches.lists):
                    self.batches.add_lists(each)
        unclear = self.batches.learn_lists(self.before_hooks(batch), self.batches.samples)
        cut = world.size > 1 or any(each.micro_batches > 1 for each in self.game.phases)
        if unclear and cut and not last:
            raise not_clear(unclear)
        if cut and not last and not self.met:
            self.batches.check_first(batch)
        self.met = True
        size = 0
        with suppress(UserError):  # a training_step of the author's may make its batch from anything
            size = self.batches.rows(batch)
        self.training.same_on_ranks.begin(size)

    def _same_dice(self) -> None:
        """Where losses draw from NumPy or Python, give all ranks the first one's numbers, as one device has them.

        A callback for the first rank alone may have drawn from them too, as to choose a sample that it shows.
        """
        if self.training.draws.by_dice:
            self.whereabouts.begin_step(self.game.step)
            with self.whereabouts.named():
                dice, world = random_state.dice(), self.training.world
                if not agree(random_state.sign_of(dice), world.device):
                    random_state.set_dice(world.broadcast(dice))
