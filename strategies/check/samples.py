"""The samples on which a step is tried: a few of each rank's batch, or all of them."""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from gan.files.errors import UserError
from nets.norm import rows_together
from strategies.batches.micro_batches import Batches, tensors
from strategies.turn import Training

SAMPLES = 2  # of each rank, at least
ROOM = {"cpu": 4}  # a device may get so many times its own batch; a GPU once, because it may have no more memory


def on_cpu(batch: Any) -> Any:
    """The batch without the graph of a loss, which may have asked for gradients of its samples."""
    return apply_to_collection(batch, Tensor, lambda x: x.detach().cpu().requires_grad_(x.requires_grad))


def deal(training: Training, batch: Any) -> tuple[Any, Any] | None:
    """This rank's part of the first rank's samples, and these samples; None if there are too few for all ranks."""
    world, batches = training.world, training.batches
    with suppress(UserError):
        first = world.broadcast(on_cpu(batch))
        together = world.size * samples_together(training)
        count = batches.rows(first) // together * together
        samples = batches.first_rows(first, count)
        return (batches.deal(samples, world.rank, world.size), samples) if count else None
    return None


def first_samples(training: Training, batch: Any, most: bool = False) -> Any:
    """The first samples of this rank's batch, on the CPU: a few, or as many as one device has room for from all ranks.

    None, with a warning, if there can be no trial.
    """
    world, batches, together = training.world, training.batches, samples_together(training)
    try:
        own_rows, why = batches.rows(batch), ""
    except UserError as error:
        own_rows, why = 0, f"because its batch cannot be cut: {error}"
    everyone = world.gather((own_rows, why))
    why = next((why for _, why in everyone if why), "")
    if any(each != everyone[0] for each in everyone) and not why:
        return None  # unequal rows are refused in the phase
    if not why:
        room = ROOM.get(world.device.type, 1) * own_rows // world.size
        few = together * max(1, min(own_rows if most else SAMPLES, own_rows, room) // together)
        samples = f"{few * world.size} samples, {few} of each rank"
        why = f"which may have no memory for {samples}; check it once on fewer ranks"
        counts = range(few, min(own_rows, room) + 1, together)
        # A loss may keep what it made in an earlier step for as many samples as training has.
        for count in sorted(counts, key=lambda count: training.game.step and own_rows in (count, count * world.size)):
            own, failed = None, ""
            try:
                own = on_cpu(batches.first_rows(batch, count))
                batches.first_rows(own, count)
                for phase in training.game.phases:
                    batches.split(own, count, phase.micro_batches, phase.name)
            except UserError as error:  # so few may look like something else: two rows in each item of a pair
                failed = f"because its {'batch' if own is None else 'first samples'} cannot be cut: {error}"
            failures = [each for each in world.gather(failed) if each]
            if not failures:
                return own
            why = failures[0]
    rank_zero_warn(f"the first step is not checked against one device, {why}")
    return None


def one_each(batches: Batches, everyone: Sequence[Any]) -> bool:
    """Whether one of several loaders gives each rank one sample beside more of another.

    In a batch such a sample looks like a constant, which one device has once. But then all ranks have the same.
    """
    columns = zip(*map(tensors, everyone), strict=False)
    alone = [column for column in columns if column[0].ndim and len(column[0]) == 1]
    unlike = any(not torch.equal(first, each) for first, *others in alone for each in others)
    return len(batches.sizes) > 1 and unlike and not batches.fits(1, batches.rows(everyone[0]))


def has_room(training: Training, own: Any, batch: Any) -> bool:
    """Whether the whole batch has more samples than `own`, and one device has room for those of all ranks."""
    room = training.world.size <= ROOM.get(training.world.device.type, 1)
    return room and batch is not None and training.batches.rows(own) < training.batches.rows(batch)


def samples_together(training: Training) -> int:
    """A trial has so many samples on each rank, or a multiple."""
    together = math.lcm(*(phase.micro_batches for phase in training.game.phases))
    return together * math.lcm(*(rows_together(policy.player.module) for policy in training.policies.values()))
