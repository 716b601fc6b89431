"""Open a run again from its folder: its networks as they were saved, and its held-out samples."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, Protocol, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from jsonargparse import Namespace
from lightning import LightningDataModule, LightningModule
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor

from datasets import GanData
from datasets.augment import Item, Samples, as_item, to_tensors
from gan.app.run import folder, options
from gan.app.run.folder import RunFolder
from gan.app.run.resumed import what_to_type, where_data_are
from gan.files.checkpoint import Share, load, read, take_format
from gan.files.errors import Damaged, UserError, explained, reason
from gan.files.finite import NotFinite, as_made, names_of, of_players
from gan.making import drawing_from
from gan.ranks import alone
from gan.runs import Run, build, full_name
from gan.runs.run import made_to
from gan.sound import Sound
from strategies.accelerator import best_device, say_devices
from strategies.batches.micro_batches import Batches
from strategies.hooks import overrides
from strategies.world import World

T = TypeVar("T")


@dataclass(frozen=True)
class SavedRun:
    """A run with the weights of one of its checkpoints, which was saved after `step`.

    `name` is the run's, as its settings have it. `averaged` are the players whose weights are averages. `gone`: why
    the run's data cannot be opened, if so; then reading a sample is this error.
    """

    name: str
    folder: RunFolder
    checkpoint: Path
    step: int
    settings: dict[str, Any]
    run: Run
    averaged: frozenset[str]
    gone: str = ""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the data's classes, by their numbers; none where the data have no names."""
        return tuple(self.of_data("class_names") or ())

    def of_data(self, name: str) -> Any:
        """What the samples to train on say of themselves by that name; None where they do not."""
        return getattr(getattr(self.run.data, "train", None), name, None)


class NotMade(UserError):
    """The game and the data of a run cannot be made, as where its data are gone; the cause says why."""


def open_run(
    which: str = "auto",
    out: Path = Path("runs"),
    device: str = "cpu",
    data: str | Path | None = None,
    name: str | None = None,
    weights: Literal["ema", "raw"] = "ema",
    exactly: bool = False,
    **overrides: Any,
) -> SavedRun:
    """Build a run from its settings and load a checkpoint's weights, averaged ones where a player has them.

    `which` is a run's folder, a checkpoint inside one, or `auto`: the newest run below `out` that has a checkpoint.
    `data` is the folder of the run's pictures, if they have moved. `name` is a run's name, as for `--run`: `auto` is
    then the newest run of that name, and an own run may have moved. `overrides` are other settings to change. With
    "raw" no player gets an average. `exactly`: the networks take the number format of the checkpoint. The networks are
    in evaluation mode and require no gradients. The run may still be training.
    """
    place, gone = device_of(device), None
    if data:
        overrides["data"] = str(data)
    while True:
        try:
            found = folder.find(which, out, name and full_name(name))
        except FileNotFoundError:
            continue  # training has just removed a checkpoint: there is a newer one
        except OSError as error:
            raise UserError(f"cannot look for the run '{which}': {reason(error)}") from error
        if found is None:
            what = f"run of {full_name(name)}" if name else "run"
            raise UserError(
                f"no {what} with a checkpoint in '{out}'; train one with python -m gan.fit, or name a run's folder"
            )
        where, checkpoint = found
        settings = options.load(where.settings, name, **overrides)
        run, without = build_again(settings, where)
        try:
            saved = load(checkpoint)
            averaged = _load(run, saved, checkpoint, weights, exactly)
        except UserError as error:
            if isinstance(error, Damaged | NotFinite) and checkpoint.exists():
                raise UserError(f"{error}; {what_to_type(where, checkpoint)}") from error
            if checkpoint.exists() or str(checkpoint) == which or checkpoint == gone:
                raise
            gone = checkpoint  # training has just replaced it with a newer one
            continue
        run.game.eval().requires_grad_(False).to(place)
        return SavedRun(
            settings.run, where, checkpoint, saved["global_step"], settings.as_dict(), run, averaged, without
        )


def device_of(device: str) -> torch.device:
    if device == "auto":
        return torch.device(best_device())
    known = ", ".join(dict.fromkeys(["auto", "cpu", best_device()]))
    with explained(f"unknown device '{device}'; type {known}", RuntimeError):
        place = torch.device(device)
    there = torch.accelerator.device_count() if place.type == best_device() else 0
    if place.type != "cpu" and (place.index or 0) >= there:
        raise UserError(f"device '{device}' is not there: this machine has {say_devices(there, place.type)}; type cpu")
    return place


def build_again(settings: Namespace, where: RunFolder) -> tuple[Run, str]:
    """The game and the data that a run's settings make, to be looked at, and why its data cannot be opened, if so."""
    chosen = options.run_settings(settings)
    said, shape = folder.json_in(where.networks), folder.json_in(where.data) or None
    try:
        with made_to("look", said, shape):
            return build(settings.run, **chosen), (shape or {}).get("gone", "")
    except UserError as error:
        if "data" not in chosen:
            raise
        raise NotMade(f"{where.path} cannot be opened: {where_data_are(error, chosen)}") from error
    except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
        if shape is None or "gone" not in shape:  # it is not the file, but the program that makes the run
            raise
        raise UserError(f"cannot read '{where.data}': {error!r}; put back what gan.fit wrote") from error


def _load(
    run: Run, saved: dict[str, Any], checkpoint: Path, weights: str = "ema", exactly: bool = False
) -> frozenset[str]:
    """Load weights and averages, after a check that they are of this game. Returns whose weights are averages."""
    game = run.game
    game.assemble()
    meant = {name: as_made(player.module) for name, player in game.players.items()}
    networks = [(name, player.module) for name, player in game.players.items()]
    players = saved.get("players", {})
    if saved.get("game") != type(game).__name__ or list(players) != list(game.players):
        whose, who = saved.get("game", "another program"), ", ".join(players) or "unknown"
        raise UserError(
            f"{checkpoint} is of {whose} with players {who}; the run's settings make {type(game).__name__} with "
            f"players {', '.join(game.players)}; if its code has other names now, change them back"
        )
    game._take(saved, f"{checkpoint} has other networks than the run's settings make", game.strict_loading, exactly)
    averages = {name: (weights != "raw" and each["ema"]) or {} for name, each in players.items()}
    bad = of_players(networks, meant)
    for name, player in game.players.items():
        tensors = dict(player.module.named_buffers(remove_duplicate=False))
        tensors |= dict(player.module.named_parameters(remove_duplicate=False))
        if unknown := averages[name].keys() - tensors.keys():
            raise UserError(f"{checkpoint} has an average of '{min(unknown)}', which player '{name}' does not have")
        if exactly:
            take_format(tensors, averages[name])
        read({there: Share.whole(tensors[tensor]) for tensor, there in averages[name].items()})
    if bad := bad or of_players(networks, meant):
        raise NotFinite(f"{checkpoint} cannot be used: {names_of(bad)}")
    return frozenset(name for name, average in averages.items() if average)


# ---- the held-out samples, wherever the loaders of a run are: of GanData or its own ----


NOTHING_HELD_OUT = "nothing is held out: these are samples that it trains on"
MOST = 1000  # samples that are read of those that a run trains on; their loader may have no end


class Numbered(Protocol):
    """Data whose samples have numbers: those to train on, and held-out ones."""

    train: Samples
    val: Samples

    @property
    def workers(self) -> int: ...


def has_numbers(data: LightningDataModule | None) -> TypeGuard[Numbered]:
    return isinstance(data, GanData) and data.val is not None


def sample_of_number(which: str, data: Numbered) -> Item | None:
    """The held-out sample of a number, or the training sample of train:NUMBER; None where it is named otherwise."""
    kind, _, number = which.rpartition(":")
    if not number.isdecimal() or kind not in ("", "train"):
        return None
    found, what = (data.train, "training") if kind else (data.val, "held-out")
    if int(number) >= len(found):
        raise UserError(f"there is no {what} picture {number}; choose from 0 to {len(found) - 1}")
    return to_tensors(as_item(found[int(number)]))


@contextmanager
def loaders_ready(run: Run, ranks: int = 1) -> Iterator[LightningDataModule | LightningModule]:
    """What has the run's loaders, ready to make those of the first rank of so many."""
    first: Any = SimpleNamespace(world_size=ranks, num_nodes=1, global_rank=0, global_step=0)  # all that data ask
    if run.data is not None:
        run.data.trainer = first
        run.data.prepare_data()
        run.data.setup("fit")
        yield run.data
        return
    before, run.game._trainer = run.game._trainer, first
    try:
        yield run.game
    finally:
        run.game._trainer = before


def batches_of(source: LightningDataModule | LightningModule, kind: str = "val") -> Iterator[Any]:
    """The batches of a loader, "val" or "train"; none where there is no such loader."""
    base = LightningDataModule if isinstance(source, LightningDataModule) else LightningModule
    loader = getattr(source, f"{kind}_dataloader")() if overrides(source, f"{kind}_dataloader", base) else []
    return (batch for batch, *_ in CombinedLoader(loader, "min_size" if kind == "train" else "sequential"))


def first_batches(run: Run, most: int | None = None) -> tuple[Iterator[Any], bool]:
    """Batches of the first held-out samples, as one device reads them, and whether they are held out.

    If nothing is held out, they are of samples that the run trains on, and at most MOST of them.
    """
    with alone(), loaders_ready(run) as source:
        first = list(islice(found := batches_of(source), 1))
        if first:
            return _cut(chain(first, found), most), True
        return _cut(batches_of(source, "train"), min(most or MOST, MOST)), False


def first_samples(batches: Iterator[Any], count: int) -> Any | None:
    """The first samples as one batch; None if there are none."""
    found = list(_cut(batches, count))
    return Batches().join(found) if found else None


@torch.no_grad()
def shown_columns(game: Any, batch: Any, seed: int = 0) -> dict[str, Tensor | Sound]:
    """The columns that a game shows of a batch, with the noise of a seed; none if it has no `show(batch)`."""
    with drawing_from(seed, game.device):
        return game.show(batch) if hasattr(game, "show") else {}


def _cut(batches: Iterator[Any], most: int | None) -> Iterator[Any]:
    left, how = most, Batches()
    for batch in batches:
        if left is not None and how.rows(batch) > left:
            batch = how.first_rows(batch, left)
        left = left and left - how.rows(batch)
        yield batch
        if left == 0:
            return


# ---- ranks that share a work ----


def ranks_here() -> World:
    """The ranks of a command that share its work. They exchange what is in main memory."""
    return World(dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else World()


def open_together(opening: Callable[[str], T], which: str, checkpoint: Callable[[T], object]) -> T:
    """What the first rank opens, opened on all ranks: training may be writing newer checkpoints."""
    world, opened, failure = ranks_here(), None, None
    if world.rank == 0:
        try:
            opened = opening(which)
        except UserError as error:
            failure = error
    found, failure = world.broadcast((opened and str(checkpoint(opened)), failure))
    if failure is not None:
        raise failure
    return opening(found) if opened is None else opened


def in_turns(parts: Iterable[T], world: World) -> Iterator[tuple[T, bool]]:
    """This rank's parts of a work, and whether another rank has the part too: each rank has one in every turn."""
    parts = iter(parts)
    while some := list(islice(parts, world.size)):
        yield some[min(world.rank, len(some) - 1)], world.rank >= len(some)
