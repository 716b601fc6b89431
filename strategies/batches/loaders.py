"""What several ranks must agree on about a loader."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from datasets import GlobalBatches, GlobalLoader, GlobalStream, ResumableLoader
from gan.files.errors import UserError
from gan.making import drawing_from
from gan.noise import seed_for
from strategies import private
from strategies.accelerator import pins
from strategies.batches import random_state
from strategies.batches.micro_batches import Batches, columns
from strategies.world import World

FEW = 4  # samples


class SameOrder(DistributedSamplerWrapper):
    """Lightning's wrapper, which lets each rank take its part of the order that a person's own sampler makes.

    Each rank makes the whole order. It must be the same order everywhere, and a sampler often draws it from torch's
    own generator, which differs from rank to rank. So it draws from generators that are seeded by the epoch.
    """

    def __iter__(self) -> Iterator[Any]:
        with drawing_from(seed_for("order", self.seed, self.epoch)):
            sampler = private.own_sampler(self)
            order = list(islice(sampler, len(sampler)))  # it may have no end
            return iter([order[place] for place in DistributedSampler.__iter__(self)])


class DealtLoader:
    """A loader of global batches, of which this rank takes its rows: under dp a loader need not know of ranks.

    Each rank reads all of it, as one process would. All must read the same, so what the training's loaders draw, one
    after the other, comes from generators of their own, which begin on all ranks where the first one's are.
    """

    def __init__(self, loader: Any, rank: int, ranks: int, batches: Batches) -> None:
        self.loader, self.rank, self.ranks, self.batches = loader, rank, ranks, batches
        if hasattr(loader, "state_dict"):  # since Python 3.12 Lightning does not find it by __getattr__
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def batch_size(self) -> int | None:
        """How many samples of a batch this rank gets."""
        whole = getattr(self.loader, "batch_size", None)
        return whole and whole // self.ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)

    def __iter__(self) -> Iterator[Any]:
        with self._drawing():  # now, because among several loaders it draws before all first batches
            batches = iter(self.loader)
        return self._dealt(batches)

    def _dealt(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self._drawing():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            self.batches.learn_lists(batch, getattr(self.loader, "batch_size", None))
            yield self.batches.deal(batch, self.rank, self.ranks)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        own = random_state.capture()
        random_state.restore(self.batches.draws)
        try:
            yield
        finally:
            self.batches.draws = random_state.capture()
            random_state.restore(own)


def prepare_loader(loader: Any, world: World, training: bool, is_dp: bool, overfits: bool, batches: Batches) -> Any:
    """The loader as ranks read it, made again if need be. `overfits`: the first batches come in each epoch."""
    if type(loader) in (GlobalLoader, GlobalStream) and (overfits or loader.ranks != world.size):
        loader = loader.again()
    if is_dp and training and world.size > 1:
        batches.draws = batches.draws or world.broadcast(random_state.capture())
        made_for = getattr(loader, "ranks", None) or getattr(getattr(loader, "sampler", None), "num_replicas", 1)
        if made_for != world.size:  # it was not made for this rank, as by GlobalLoader in `train_dataloader()`
            loader = DealtLoader(loader, world.rank, world.size, batches)
    check_loader(loader, world.size, training)
    sampler = getattr(loader, "sampler", None)
    if training and isinstance(sampler, GlobalBatches) and not sampler.training and sampler.length % world.size:
        raise UserError(
            f"{sampler.length} samples cannot be dealt out to {world.size} ranks, and this loader leaves none out; "
            f"train with GlobalLoader(training=True), which leaves out an incomplete last batch"
        )
    if isinstance(loader, ResumableLoader):
        loader.sampler.epoch = loader.sampler.passes = 0  # of an earlier fit
        loader.sampler.shuffle = loader.sampler.shuffle and not overfits
        if world.size > 1:
            _compare_data(loader, world.each(loader.signs))
    if isinstance(loader, ResumableLoader | GlobalStream):
        loader.pin_memory = pins(world.device)
    return loader


def _compare_data(loader: ResumableLoader, signs: list[tuple[int, list[int]]]) -> None:
    """A sample must be the same on each rank and each time. Files in another order on each rank are common."""
    length, samples = signs[0]
    if any(own[::2] != own[1::2] for _, own in signs):
        data = getattr(loader.dataset, "dataset", loader.dataset)  # the author's, inside of ours
        rank_zero_warn(
            f"a sample of {type(data).__name__} differs when it is read twice with the same seed, so ranks, workers "
            f"and resumed runs get others than one device: it draws from a generator of its own. Draw by torch.rand, "
            f"numpy.random or random in __getitem__, or seed the generator there by torch.randint(2**31, ()).item()"
        )
        return
    for rank, (other, others) in enumerate(signs):
        if other != length:
            raise UserError(
                f"rank {rank} has {other} samples, and rank 0 {length}: all ranks read the same data set. Does each "
                f"look for the files itself, or split them by dice of its own?"
            )
        if others != samples:
            rank_zero_warn(
                f"rank {rank}'s data set has other samples than rank 0's at the same places, so training differs from "
                f"one device's: sort the files, and seed what shuffles or splits them (random, NumPy) alike on all "
                f"ranks"
            )
            return


def check_together(loaders: Any, ahead: int) -> None:
    """Name loaders of one seed, which go through their samples in one order. `ahead`: batches that wait already."""
    known: set[tuple[int, int]] = set()
    for each in (each for each in tree_leaves(loaders) if isinstance(each, ResumableLoader)):
        each.ahead = ahead
        own_way = each.collate_fn is not torch.utils.data.default_collate
        if isinstance(each, GlobalLoader) and each.ranks > 1 and own_way:
            _check_collated(each)
        if each.sampler.shuffle:
            key = each.sampler.length, each.sampler.seed
            if key in known:
                rank_zero_warn(
                    f"two training loaders of {key[0]} samples have the seed {key[1]}: each sample of the one always "
                    f"comes with the same sample of the other, and with the same dice; if they are no pairs, type "
                    f"GlobalLoader(..., seed={key[1] + 1}) for one of them"
                )
            known.add(key)


def _check_collated(loader: GlobalLoader) -> None:
    """Warn if a collate_fn sorts, mixes, draws or looks at all samples: a rank gives it its own ones alone.

    Shown by the first few samples, the same ones the other way round, and each half of them twice.
    """
    count = min(FEW, loader.sampler.length) // 2 * 2
    asked = [(0, index) for index in range(count)]
    halves = asked[: count // 2], asked[count // 2 :]
    with suppress(Exception), random_state.untouched():  # it may need a whole batch
        read = loader.read([*asked, *asked[::-1], *halves[0] * 2, *halves[1] * 2], count, loader.collate_fn)
        each = zip(*(columns(batch, count) for batch in read), strict=True)
        rows_of = [leaves for leaves in each if leaves[0].shape[:1] == (count,)]
        pairs = [(all_of_them, other.flip(0)) for all_of_them, other, *_ in rows_of]
        for all_of_them, _, *twice in rows_of:
            both = zip(all_of_them.split(count // 2), (each[: count // 2] for each in twice), strict=True)
            pairs += [(one, other) for one, other in both if one.shape == other.shape]  # half may be padded less
        if not all(torch.equal(*pair) for pair in pairs):
            rank_zero_warn(
                "collate_fn puts samples into another order or dimension, mixes them, draws, or computes with all of "
                "them, as with their maximum. It gets a rank's own samples, so a row differs from one device, or what "
                "a loss draws for it, and no trial sees it: return samples in their order, first (as [batch, time]; "
                "pack_padded_sequence(..., enforce_sorted=False) needs no other order; what all samples share, such "
                "as times, belongs into an attribute), and do the rest in on_after_batch_transfer or in the loss"
            )


def check_loader(loader: Any, ranks: int, training: bool) -> None:
    """Make the order of a loader the same on all ranks. Refuse or name what would differ from one device."""
    if isinstance(loader, (ResumableLoader, GlobalStream)) and loader.ranks != ranks:
        where = "make it in train_dataloader() of the game or its data module, where the ranks are known"
        if ranks == 1:
            where = "if a training before has left them, type torch.distributed.destroy_process_group() after it"
        raise UserError(
            f"a {type(loader).__name__} was made for {loader.ranks} rank(s), and there are {ranks}; {where}"
        )
    samplers = [getattr(holder, "sampler", None) for holder in (loader, getattr(loader, "batch_sampler", None))]
    for sampler in samplers:
        if type(sampler) is DistributedSamplerWrapper:
            sampler.__class__ = SameOrder
    known = isinstance(loader, DealtLoader) or any(isinstance(sampler, GlobalBatches) for sampler in samplers)
    known = known or getattr(loader, "ranks", None) == ranks
    if not training or ranks == 1 or known:
        return
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        reads = f"the training loader deals samples out one by one (rank 0 gets 0, {ranks}, {2 * ranks}, ...)"
        differs = "so training differs from one device's"
    else:
        data = getattr(loader, "dataset", None)
        what = f"stream {type(data).__name__}" if isinstance(data, IterableDataset) else type(loader).__name__
        reads = f"each of the {ranks} ranks reads the {what} by itself"
        differs = (
            f"so training differs from one device's, unless they read the parts of one batch; a sample is trained on "
            f"{ranks} times if all read the same ones"
        )
    maps = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    theirs = (SequentialSampler, RandomSampler, DistributedSampler)
    if maps and all(type(sampler) in theirs for sampler in samplers):
        ours = "GlobalLoader(dataset"
    elif maps:  # such as a WeightedRandomSampler
        ours = "GlobalLoader(dataset, sampler=your sampler"
    else:
        ours = "GlobalStream(stream"
    rank_zero_warn(
        f"{reads}, {differs}; return {ours}, batch_size=...) from train_dataloader(), with `from datasets import "
        f"{ours.partition('(')[0]}`; batch_size counts all ranks' samples"
    )
