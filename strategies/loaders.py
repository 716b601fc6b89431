"""What several ranks must agree on about a loader."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.utilities import rank_zero_warn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from datasets import GlobalLoader, GlobalStream, ResumableLoader
from gan.files.errors import UserError
from gan.noise import seed_for
from strategies import random_state
from strategies.accelerator import pins
from strategies.micro_batches import deal_batch
from strategies.world import World


class SameOrder(DistributedSamplerWrapper):
    """Lightning's wrapper, which lets each rank take its part of the order that a person's own sampler makes.

    Each rank makes the whole order. It must be the same order everywhere, and a sampler often draws it from torch's
    own generator, which differs from rank to rank. So it draws from generators that are seeded by the epoch.
    """

    def __iter__(self) -> Iterator[Any]:
        with random_state.untouched():
            random_state.reseed(seed_for("order", self.seed, self.epoch))
            return iter(list(super().__iter__()))


class DealtLoader:
    """A loader of global batches, of which this rank takes its rows: under dp a loader need not know of ranks.

    Each rank reads all of it, as one process would. All must read the same, so what the loader draws comes from
    generators of its own, which begin on all ranks where the first one's are.
    """

    def __init__(self, loader: Any, rank: int, ranks: int, draws: Mapping[str, Any]) -> None:
        self.loader, self.rank, self.ranks, self.draws = loader, rank, ranks, draws
        if hasattr(loader, "state_dict"):  # since Python 3.12 Lightning does not find it by __getattr__
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["loader"], name)

    def __iter__(self) -> Iterator[Any]:
        with self._drawing():
            batches = iter(self.loader)
        while True:
            with self._drawing():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield deal_batch(batch, self.rank, self.ranks)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        own = random_state.capture()
        random_state.restore(self.draws)
        try:
            yield
        finally:
            self.draws = random_state.capture()
            random_state.restore(own)


def prepared(loader: Any, world: World, training: bool, is_dp: bool) -> Any:
    """The loader as ranks read it. One of ours that was made before the ranks were known is made again."""
    if type(loader) in (GlobalLoader, GlobalStream) and loader.ranks != world.size:
        loader = loader.again()
    if is_dp and training and world.size > 1:
        draws = world.broadcast(random_state.capture())
        made_for = getattr(loader, "ranks", None) or getattr(getattr(loader, "sampler", None), "num_replicas", 1)
        if made_for != world.size:  # it was not made for this rank, as by GlobalLoader in `train_dataloader()`
            loader = DealtLoader(loader, world.rank, world.size, draws)
    check_loader(loader, world.size, training)
    if isinstance(loader, ResumableLoader | GlobalStream):
        loader.pin_memory = pins(world.device)
    return loader


def _reads_all(loader: Any) -> bool:
    """Whether a loader's batches are of torch's own samplers, which know no ranks, as where Lightning may put none."""
    batches = getattr(loader, "batch_sampler", None)
    samplers = RandomSampler, SequentialSampler
    return type(loader) is DataLoader and type(batches) is BatchSampler and type(batches.sampler) in samplers


def check_loader(loader: Any, ranks: int, training: bool) -> None:
    """Make the order of a loader the same on all ranks. Refuse or name what would differ from one device."""
    if isinstance(loader, (ResumableLoader, GlobalStream)) and loader.ranks != ranks:
        raise UserError(
            f"a {type(loader).__name__} was made for {loader.ranks} rank(s), and there are {ranks}; make it in "
            f"train_dataloader() of the game or its data module, where the ranks are known"
        )
    streams = isinstance(getattr(loader, "dataset", None), IterableDataset)
    streams = streams and not isinstance(loader, GlobalStream | DealtLoader)
    if training and ranks > 1 and streams:
        rank_zero_warn(
            f"each of the {ranks} ranks reads the stream {type(loader.dataset).__name__} by itself, so training "
            f"differs from one device's, and a sample is trained on {ranks} times if all read the same ones; return "
            f"GlobalStream(stream, batch_size=...) from train_dataloader(), with `from datasets import GlobalStream`; "
            f"batch_size counts all ranks' samples"
        )
    if training and ranks > 1 and _reads_all(loader):
        rank_zero_warn(
            f"each of the {ranks} ranks reads the {type(loader.dataset).__name__} by itself, so training differs from "
            f"one device's, and a sample is trained on {ranks} times if all read the same ones; return "
            f"GlobalLoader(dataset, batch_size=...) from train_dataloader(), with `from datasets import GlobalLoader`; "
            f"batch_size counts all ranks' samples"
        )
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(holder, "sampler", None)
        if type(sampler) is DistributedSamplerWrapper:
            sampler.__class__ = SameOrder
        if training and ranks > 1 and type(sampler) in (DistributedSampler, SameOrder):
            loader = "GlobalLoader(dataset"
            if type(sampler) is SameOrder:  # of the author's own sampler, such as a WeightedRandomSampler
                loader = "GlobalStream(the samples in your sampler's order"
            rank_zero_warn(
                f"the training loader deals samples out one by one (rank 0 gets 0, {ranks}, {2 * ranks}, ...), so "
                f"training differs from one device's; return {loader}, batch_size=...) from train_dataloader(), with "
                f"`from datasets import {loader.partition('(')[0]}`; batch_size counts all ranks' samples"
            )
