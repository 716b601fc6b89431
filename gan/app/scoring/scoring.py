"""Scoring a run's pictures, shared among ranks: the same figures at any number of them."""

import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torchmetrics
import torchvision
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from datasets.augment import Prepared
from gan import noise
from gan.app.painting.reopen import NOTHING_HELD_OUT, SavedRun, has_numbers, samples
from gan.app.scoring.outputs import Heard, Made, makes
from gan.app.scoring.scorer import Rows, choose
from strategies.accelerator import name_of
from strategies.micro_batches import rows

T = TypeVar("T")
VERSIONS = {module.__name__: module.__version__ for module in (torch, torchvision, torchmetrics)}


# What one rank has found: a task, the number of a batch's first sample, and a row a sample; and sums by task and name.
RankResult = tuple[list[tuple[str, int, Rows]], dict[tuple[str, str], Tensor]]


@torch.no_grad()
def evaluate(
    opened: SavedRun,
    *,
    scores: tuple[str, ...] = (),
    inception: Path | None = None,
    statistics: Path | None = None,
    segmenter: Path | None = None,
    ignore: tuple[int, ...] = (),
    count: int | None = None,
    batch_size: int = 8,
    device: str = "cpu",
) -> dict[str, Any] | None:
    """Score what a run makes of its held-out samples; gives everything that the JSON file says.

    Where torch.distributed is initialised, the ranks share the work: the first gets the result and the others None.
    See [Note: the same figures at any number of ranks].
    """
    game, data = opened.run.game, getattr(opened.run.data, "val", None)
    rank, ranks = this_rank(), _ranks()
    count, held_out = _counts(opened, count)
    if not held_out and rank == 0:
        print(NOTHING_HELD_OUT, flush=True)

    # What the game makes of one sample shows which scores are possible.
    ((_, shown),) = _made(opened, count, device, 1, first=1)
    files = {"inception": inception, "statistics": statistics, "segmenter": segmenter}
    scorer = choose(shown, count, scores, labels=getattr(game, "labels", 0), ignore=ignore, **files).to(device)

    # Score this rank's batches.
    found: list[tuple[str, int, Rows]] = []
    sums: dict[tuple[str, str], Tensor] = {}
    with tqdm(total=count, unit="sample", disable=rank > 0, dynamic_ncols=True, mininterval=0.5) as bar:
        for numbers, made in _made(opened, count, device, batch_size, rank=rank, ranks=ranks):
            for title, each in made.items():
                found.append((title, numbers[0], scorer.rows(each)))
                for name, values in scorer.sums(each).items():
                    sums[title, name] = sums.get((title, name), 0) + values
            bar.update(min(len(numbers) * ranks, count - bar.n))

    results = _gather((found, sums))
    if results is None:
        return None
    label_names = getattr(data, "label_names", ())
    return {
        "run": opened.name,
        "folder": opened.folder.path.name,
        "checkpoint": opened.checkpoint.name,
        "step": opened.step,
        "data": type(data if data is not None else opened.run.data or game).__name__,
        "pictures": count,
        "held_out": held_out,
        "scores": {title: scorer.figures(*_joined(results, title), label_names) for title in shown},
        "left_out": scorer.left_out,
        "notes": scorer.notes(count),
        "about": scorer.about(count),
        "averaged": sorted(opened.averaged),
        "settings": opened.settings,
        "computed": {"ranks": ranks, "batch_size": batch_size, "device": name_of(device)},
        "versions": {"python": platform.python_version(), **VERSIONS},
    }


# [Note: the same figures at any number of ranks]
# The held-out samples are cut into batches once, and the batches are shared out among the ranks. A batch has the same
# samples on whichever rank it is computed, and its noise comes from the numbers of its samples. No batch is padded and
# none is left out: that would only be needed to keep ranks in step, and here they exchange nothing before the end.
# Then the results are gathered: rows (a few numbers or a feature vector a picture) and sums of whole numbers. The rows
# are put in the order of the samples before anything is summed. So the figures are the same on one rank and on ten.
# With another batch size they are the same up to the rounding of the networks' float32.
#
# [Note: one gathering]
# The results go through gloo on GPUs as well: they are gathered once, and their tensors are in main memory already.


def _counts(opened: SavedRun, most: int | None) -> tuple[int, int]:
    """How many samples are scored, and how many are held out."""
    if has_numbers(opened.run.data):
        held_out = len(opened.run.data.val)
        return min(most or held_out, held_out), held_out
    found, held = samples(opened.run, most)
    count = sum(map(rows, found))
    return count, count if held else 0


def _made(
    opened: SavedRun, count: int, device: str, batch_size: int, rank: int = 0, ranks: int = 1, first: int | None = None
) -> Iterator[tuple[range, dict[str, Made | Heard]]]:
    """This rank's batches of sample numbers, with what the game makes of them; or those of the `first` ones only."""
    for numbers, batch in _batches(opened, min(first or count, count), batch_size, rank, ranks, 0 if first else None):
        batch = move_data_to_device(batch, torch.device(device))
        with noise.at(noise.Place(("evaluate",), numbers[0], len(numbers), count)):
            made = makes(opened.run.game, batch, torch.tensor(numbers))
        yield numbers, made


def _batches(
    opened: SavedRun, count: int, batch_size: int, rank: int, ranks: int, workers: int | None
) -> Iterator[tuple[range, Any]]:
    """This rank's batches. Loaders of a person's own are read on every rank, in their own batches."""
    data = opened.run.data
    if has_numbers(data):
        cut = [range(at, min(at + batch_size, count)) for at in range(0, count, batch_size)][rank::ranks]
        picks = [[(0, number) for number in numbers] for numbers in cut]
        workers = data.workers if workers is None else workers
        yield from zip(cut, DataLoader(Prepared(data.val), batch_sampler=picks, num_workers=workers), strict=True)
        return
    at = 0
    for turn, batch in enumerate(samples(opened.run, count)[0]):
        numbers = range(at, at := at + rows(batch))
        if turn % ranks == rank:
            yield numbers, batch


def _joined(results: list[RankResult], title: str) -> tuple[Rows, Rows]:
    """One task's rows of all pictures in their order, and its sums over all ranks."""
    batches = {first: rows for found, _ in results for of, first, rows in found if of == title}
    in_order = [batches[first] for first in sorted(batches)]
    rows = {name: torch.cat([each[name] for each in in_order]) for name in in_order[0]}
    names = dict.fromkeys(name for _, sums in results for of, name in sums if of == title)
    every = {name: [sums[title, name] for _, sums in results if (title, name) in sums] for name in names}
    return rows, {name: torch.stack(each).sum(0) for name, each in every.items()}


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gather(result: RankResult) -> list[RankResult] | None:
    """The results of all ranks on the first rank, None on the others."""
    if _ranks() == 1:
        return [result]
    results = [result] * _ranks() if this_rank() == 0 else None  # these are replaced
    dist.gather_object(result, results)
    return results


def from_first_rank(value: T) -> T:
    """The first rank's value, on all ranks."""
    values = [value]
    if _ranks() > 1:
        dist.broadcast_object_list(values)
    return values[0]
