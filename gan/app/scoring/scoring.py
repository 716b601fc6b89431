"""Scoring what a game makes, shared among ranks: the same figures at any number of them."""

import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchmetrics
import torchvision
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from datasets import GanData
from datasets.augment import Prepared, Samples
from datasets.workers import Loader
from gan import noise
from gan import ranks as all_ranks
from gan.app.run.reopen import NOTHING_HELD_OUT, SavedRun, first_batches, has_numbers, in_turns, ranks_here
from gan.app.scoring.features import Known
from gan.app.scoring.names import HELD_OUT, TRAINED_ON
from gan.app.scoring.outputs import Heard, Made, makes
from gan.app.scoring.scorer import Rows, Scorer, choose
from gan.files.errors import UserError, progress
from strategies.accelerator import name_of
from strategies.batches.micro_batches import Batches
from strategies.world import World

ORDER = 0  # the seed of the order in which samples are scored
MOST = 50_000  # pictures that are made for a score, as published
VERSIONS = {module.__name__: module.__version__ for module in (torch, torchvision, torchmetrics)}

Turn = tuple[range, Any, bool]  # the numbers of samples, a batch of them, and whether another rank has it too


@torch.no_grad()
def evaluate(
    opened: SavedRun,
    *,
    scores: tuple[str, ...] = (),
    inception: Path | None = None,
    lpips: Path | None = None,
    segmenter: Path | None = None,
    ignore: tuple[int, ...] = (),
    against: str | None = None,
    count: int | None = None,
    batch_size: int = 8,
    device: str = "cpu",
) -> dict[str, Any] | None:
    """Score what a run makes of its held-out samples; gives everything that the JSON file says.

    What is made from noise is compared with all that the run trains on, unless it is `against` "held-out".
    Where torch.distributed is initialised, the ranks share the work: the first gets the result and the others None.
    See [Note: the same figures at any number of ranks].
    """
    game, data, world = opened.run.game, opened.run.data, ranks_here()
    val = getattr(data, "val", None)
    asked, (count, held_out) = count, _counts(opened, count)
    prepared = partial(move_data_to_device, device=torch.device(device))
    # What the game makes of one sample shows which scores are possible.
    numbers, first, _ = next(_turns(opened, 1, 1, World(), workers=0))
    shown = play(game, numbers, prepared(first), count)
    whole = _against(data, shown, against)
    true = f"{held_out} {HELD_OUT}" if held_out else f"{count} samples that it trains on"
    if whole is not None:
        count, true = to_make(shown, whole.train, asked), f"{len(whole.train)} {TRAINED_ON}"
    elif not held_out and world.rank == 0:
        print(NOTHING_HELD_OUT, flush=True)
    files = {"inception": inception, "lpips": lpips, "segmenter": segmenter}
    scorer = choose(shown, count, scores, labels=getattr(game, "labels", 0), ignore=ignore, **files).to(device)
    scoring, names = Scoring(game, scorer, prepared, world, bar=True), getattr(val, "label_names", ())
    if whole is None:
        found = scoring.rows(_turns(opened, count, batch_size, world), count)
        figures = {title: scorer.figures(rows, sums, names) for title, (rows, sums) in found.items()}
    else:
        figures, _ = scoring.against_all(whole.train, count, batch_size, whole.workers)
    if world.rank:
        return None
    return {
        "run": opened.name,
        "folder": opened.folder.path.name,
        "checkpoint": opened.checkpoint.name,
        "step": opened.step,
        "data": type(next(each for each in (val, data, game) if each is not None)).__name__,
        "pictures": count,
        "held_out": held_out,
        "true": true,
        "scores": figures,
        "left_out": scorer.left_out,
        "notes": scorer.notes(count),
        "about": scorer.about(count, *([] if whole is None else [len(whole.train)])),
        "averaged": sorted(opened.averaged),
        "settings": opened.settings,
        "computed": {"ranks": world.size, "batch_size": batch_size, "device": name_of(device)},
        "versions": {"python": platform.python_version(), **VERSIONS},
    }


# [Note: the same figures at any number of ranks]
# The samples are cut into batches once, and the ranks take turns. In a turn each has a batch, since a player whose
# weights are shared out needs all ranks; the last ranks may have a batch that another has too, which does not count. A
# batch has the same samples on whichever rank it is computed, and its noise comes from the numbers of its samples. What
# a score needs of a sample, a few numbers or a feature vector, is gathered in the order of the samples. So the figures
# are the same on one rank and on ten. With another batch size they are the same up to the rounding of float32.
#
# The samples come in an order that is drawn once for all. Those of class folders lie class by class: the first ones, or
# a split of the Inception score, would be of few classes.


def play(game: Any, numbers: range, batch: Any, total: int) -> dict[str, Made | Heard]:
    """What a game makes of the samples with these numbers, of so many in all."""
    with noise.at(noise.Place(("evaluate",), numbers[0], len(numbers), total)):
        return makes(game, batch, torch.tensor(numbers))


@dataclass(frozen=True)
class Scoring:
    """A game that is scored, by ranks that share the work. `prepared` brings a batch to where it is played."""

    game: Any
    scorer: Scorer
    prepared: Callable[[Any], Any]
    world: World
    bar: bool = False

    def rows(self, turns: Iterable[Turn], total: int, truth: bool = True) -> dict[str, tuple[Rows, Rows]]:
        """The rows of all samples and the sums over them, by the title of what is made, on the first rank.

        All ranks must call it. `truth` says whether rows of the true pictures by themselves are wanted.
        """
        found: dict[str, dict[str, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        sums: dict[str, Rows] = defaultdict(dict)
        world, hidden = self.world, self.world.rank > 0 or not self.bar
        with progress(total=total, unit="sample", disable=hidden) as shown:
            for numbers, batch, spare in turns:
                for title, each in play(self.game, numbers, self.prepared(batch), total).items():
                    with torch.autocast(world.device.type, enabled=False):
                        rows, more = self.scorer.rows(each, truth), self.scorer.sums(each)
                    for name, values in rows.items():
                        values = all_ranks.gather(values.to(world.device))
                        found[title][name] += [values.cpu()] if world.rank == 0 else []
                    for name, values in more.items():
                        sums[title][name] = sums[title].get(name, 0) + all_ranks.sum(values * (not spare))
                shown.update(min(len(numbers) * world.size, total - shown.n))
        if world.rank:
            return {}
        joined = {title: {name: torch.cat(each)[:total] for name, each in own.items()} for title, own in found.items()}
        return {title: (once(rows), sums[title]) for title, rows in joined.items()}

    def against_all(
        self, true: Samples, count: int, batch_size: int, workers: int, known: dict[str, Known] | None = None
    ) -> tuple[dict[str, dict[str, Any]], dict[str, Known]]:
        """The figures, by title, of `count` pictures that a game makes and all true ones; as published, not mirrored.

        What is known of the true pictures by title, on the first rank, comes back too, to be computed once.
        """
        total = max(count, len(true)) if known is None else count
        found = self.rows(turns_of(true, total, batch_size, self.world, workers), total, truth=known is None)
        if known is None:
            known = {title: Known.of(rows["features of truth"][: len(true)]) for title, (rows, _) in found.items()}
        figures = {
            title: self.scorer.figures({"features": rows["features"][:count]}, sums, truth=known[title])
            for title, (rows, sums) in found.items()
        }
        return figures, known


def _against(data: Any, shown: Mapping[str, Made | Heard], against: str | None) -> GanData | None:
    """The data of which all training pictures are compared; None to compare held-out samples."""
    if from_noise(shown) and isinstance(data, GanData):
        return data if against != "held-out" else None
    if against == "train":
        raise UserError("--against train is for games that draw from noise, with a GanData; leave --against out")
    return None


def from_noise(shown: Mapping[str, Made | Heard]) -> bool:
    """Whether a sample gives other pictures each time."""
    return all(isinstance(each, Made) and not each.paired and each.numbers is None for each in shown.values())


def to_make(shown: Mapping[str, Made | Heard], true: Samples, asked: int | None) -> int:
    """How many pictures are made to be compared with all of these samples."""
    return asked if asked and from_noise(shown) else min(asked or MOST, len(true))


def once(rows: Rows) -> Rows:
    """Each picture once. Of two sides of unequal size, the smaller one's come again."""
    kept = dict(rows)
    for side, features in (("number", "features"), ("number of truth", "features of truth")):
        if side in rows:
            numbers = kept.pop(side).tolist()
            first = dict(zip(reversed(numbers), reversed(range(len(numbers))), strict=True))
            kept |= {features: rows[features][sorted(first.values())]} if features in rows else {}
    return kept


def turns_of(samples: Samples, count: int, batch_size: int, world: World, workers: int) -> Iterator[Turn]:
    """This rank's batches of so many samples, in an order drawn once for all; after the last one, the first again."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(ORDER)).tolist()
    cut = (range(at, min(at + batch_size, count)) for at in range(0, count, batch_size))
    own = list(in_turns(cut, world))
    picks = [[(0, order[number % len(samples)]) for number in numbers] for numbers, _ in own]
    loader = Loader(Prepared(samples), batch_sampler=picks, seed=0, workers=workers)
    for (numbers, spare), batch in zip(own, loader, strict=True):
        yield numbers, batch, spare


def _turns(opened: SavedRun, count: int, batch_size: int, world: World, workers: int | None = None) -> Iterator[Turn]:
    """This rank's batches. Loaders of a person's own are read on every rank, in their own batches."""
    data = opened.run.data
    if has_numbers(data):
        workers = data.workers if workers is None else workers
        yield from turns_of(data.val, count, batch_size, world, workers)
        return

    def numbered() -> Iterator[tuple[range, Any]]:
        at = 0
        for batch in first_batches(opened.run, count)[0]:
            yield range(at, at := at + Batches().rows(batch)), batch

    for (numbers, batch), spare in in_turns(numbered(), world):
        yield numbers, batch, spare


def _counts(opened: SavedRun, most: int | None) -> tuple[int, int]:
    if has_numbers(opened.run.data):
        held_out = len(opened.run.data.val)
        return min(most or held_out, held_out), held_out
    found, held = first_batches(opened.run, most)
    count = sum(map(Batches().rows, found))
    return count, count if held else 0
