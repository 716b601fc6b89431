"""`python -m gan.evaluate RUN`: scores of the pictures that a run makes, as a table and as JSON."""

import json
import logging
import math
import os
import platform
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torchmetrics
import torchvision
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from datasets.augment import Prepared
from gan import noise
from gan.errors import UserError, refuse
from gan.evaluate.scores.features import INCEPTION
from gan.evaluate.scores.judge import NEEDS, choose
from gan.evaluate.scores.outputs import Made, makes
from gan.fit import command as fit
from gan.fit import options
from gan.fit.parser import Parser
from gan.painting.reopen import Opened, open_run

T = TypeVar("T")
WIDTH = 58  # of the table's first column

ROWS = {
    "ssim": "SSIM, data range 1",
    "ssim_range_2": "SSIM, data range 2 (as published; flatters)",
    "rmse": "RMSE, of 0..1",
    "psnr": "PSNR, dB",
    "transfer_error": "style-transfer error, of 0..1",
    "region_error": "style-transfer error in the region, of 0..1",
    "region_spill": "change outside of the region, share of inside",
    "fid": "FID",
    "kid": "KID",
    "feature_distance": "Fréchet distance (not FID)",
    "kernel_distance": "kernel distance (not KID)",
    "miou": "mIoU",
    "accuracy": "pixel accuracy",
    "miou_of_truth": "mIoU of the true pictures",
    "accuracy_of_truth": "pixel accuracy of the true pictures",
}

EXAMPLES = """examples:
  python -m gan.evaluate                                    the newest run
  python -m gan.evaluate runs/001-sean-faces --scores ssim,psnr
  python -m gan.evaluate RUN --inception weights-inception-2015-12-05-6726825d.pth --devices 4
  python -m gan.evaluate RUN --segmenter deeplabv3.pth      mIoU by a state dict of torchvision's
  torchrun --nproc-per-node 4 -m -- gan.evaluate RUN
"""


@dataclass
class Part:
    """What one rank has found: rows of pictures by the number of the first, and sums of whole numbers."""

    rows: dict[tuple[str, str], dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))
    sums: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def take(self, title: str, first: int, rows: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
        """Take in what a judge says of one batch."""
        for name, values in rows.items():
            self.rows[title, name][first] = values
        for name, values in sums.items():
            self.sums[title, name] = self.sums.get((title, name), 0) + values


def main(argv: list[str] | None = None) -> int:
    """The command: 0 when it did what was asked, 2 with one clear message when it could not."""
    try:
        request = parse(argv)
        fit.quiet()
        asked = {"accelerator": request.accelerator, "devices": request.devices}
        computer = fit.machine(Namespace(**asked, num_nodes=1, strategy="ddp", precision="32-true"))
        if options.launched_ranks() is not None:
            dist.init_process_group("gloo")  # See [Note: one gathering]
            _evaluate(request, computer, int(os.environ["LOCAL_RANK"]))
            dist.destroy_process_group()
        elif computer.processes == 1:
            _evaluate(request, computer)
        else:
            logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)  # it says which processes it ends
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(_spawned, (request, computer, f"file://{folder}/meet"), nprocs=computer.processes)
    except (UserError, mp.ProcessRaisedException) as error:
        if isinstance(error, mp.ProcessRaisedException) and "UserError: " not in str(error):
            raise
        return refuse(error)
    return 0


def parse(argv: list[str] | None = None) -> Namespace:
    """The options of the command."""
    parser = Parser(
        prog="python -m gan.evaluate",
        usage="python -m gan.evaluate [RUN] [--scores LIST] [--devices N] [options]",
        description="Score what a run makes of its held-out samples: a table, and JSON in the run's folder.",
        epilog=EXAMPLES,
        formatter_class=options.Help,
        print_config=None,
    )
    add = parser.add_argument
    add("run", nargs="?", default="auto", help="a run's folder, a checkpoint inside one, or auto: the newest run")
    add("--scores", type=str, default="all", help=f"some of {','.join(NEEDS)}; default: all that can be had")
    add(
        "--inception",
        type=Path | None,
        default=None,
        help=f"weights for FID and KID; default: {INCEPTION} in torch's cache",
    )
    add(
        "--segmenter",
        type=Path | None,
        default=None,
        help="weights for mIoU: a state dict of a torchvision segmentation network",
    )
    add("--ignore_labels", type=str, default="", help="labels whose pixels mIoU leaves out, such as 0,182")
    add("--count", type=PositiveInt | None, default=None, help="score only the first so many held-out samples")
    add("--batch_size", type=PositiveInt, default=8, help="pictures at a time on each device; changes speed alone")
    add(
        "--devices", type=PositiveInt | Literal["auto"], default="auto", help="processes; auto: all GPUs, or two on CPU"
    )
    add("--accelerator", type=Literal["auto", "cpu", "gpu"], default="auto", help="what to compute on")
    add("--data", type=str | None, default=None, help="where the run's pictures are, if they have moved")
    add("--out", type=Path, default=Path("runs"), help="where to look for the newest run")
    argv = [options.underscores(argument) for argument in (sys.argv[1:] if argv is None else argv)]
    request = parser.parse_args(argv)
    request.scores, request.ignore_labels = _names(request.scores), _numbers(request.ignore_labels)
    return request


def _spawned(rank: int, request: Namespace, computer: fit.Computer, meeting: str) -> None:
    """One of the processes that the command has started."""
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=computer.processes)
    if computer.accelerator == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // computer.devices))
    fit.quiet()
    _evaluate(request, computer, rank)
    dist.destroy_process_group()


def _evaluate(request: Namespace, computer: fit.Computer, local_rank: int = 0) -> None:
    """The work of one process; the first one prints and saves what came of it."""
    device = f"cuda:{local_rank}" if computer.accelerator == "gpu" else "cpu"
    moved = {} if request.data is None else {"data": request.data}

    # All ranks open the checkpoint that the first one finds, since training may be writing newer ones.
    opened = failure = None
    if _rank() == 0:
        try:
            opened = open_run(request.run, request.out, device, **moved)
        except UserError as error:
            failure = error
    checkpoint, failure = _broadcast((opened and opened.checkpoint, failure))
    if failure is not None:
        raise failure
    if opened is None:
        opened = open_run(str(checkpoint), request.out, device, **moved)

    result = evaluate(
        opened,
        scores=request.scores,
        inception=request.inception,
        segmenter=request.segmenter,
        ignore=request.ignore_labels,
        count=request.count,
        batch_size=request.batch_size,
        device=device,
    )
    if result is not None:
        path = opened.folder.path / f"evaluation-step-{opened.step:06d}.json"
        save(result, path)
        print(table(result), f"saved in {path}", sep="\n", flush=True)


@torch.no_grad()
def evaluate(
    opened: Opened,
    *,
    scores: tuple[str, ...] = (),
    inception: Path | None = None,
    segmenter: Path | None = None,
    ignore: tuple[int, ...] = (),
    count: int | None = None,
    batch_size: int = 8,
    device: str = "cpu",
) -> dict[str, Any] | None:
    """Score what a run makes of its held-out samples: everything that the JSON file says.

    In a torch.distributed world the ranks share the work, and the first one has the result; the others None.
    See [Note: the same figures at any number of ranks].
    """
    game, data = opened.run.game, opened.run.data.val
    if data is None:
        raise UserError(f"run {opened.name} holds nothing out, so there is nothing to score")
    rank, ranks = _rank(), _ranks()
    count = min(count or len(data), len(data))
    batches = [range(first, min(first + batch_size, count)) for first in range(0, count, batch_size)]

    # One sample shows what the game makes, and so which scores can be had.
    ((_, shown),) = _made(opened, [range(1)], count, device)
    judge = choose(
        shown,
        count,
        scores,
        labels=getattr(game, "labels", 0),
        inception=inception,
        segmenter=segmenter,
        ignore=ignore,
    ).to(device)

    # Score this rank's batches.
    part = Part()
    with tqdm(total=count, unit="picture", disable=rank > 0, dynamic_ncols=True, mininterval=0.5) as bar:
        for numbers, made in _made(opened, batches[rank::ranks], count, device, opened.run.data.workers):
            for title, each in made.items():
                part.take(title, numbers[0], judge.rows(each), judge.sums(each))
            bar.update(min(len(numbers) * ranks, count - bar.n))

    # Put all ranks' together.
    parts = _gather(part)
    if parts is None:
        return None
    return {
        "run": opened.name,
        "folder": opened.folder.path.name,
        "checkpoint": opened.checkpoint.name,
        "step": opened.step,
        "data": type(data).__name__,
        "pictures": count,
        "held_out": len(data),
        "scores": {title: judge.figures(*_whole(parts, title), getattr(data, "label_names", ())) for title in shown},
        "left_out": judge.left_out,
        "notes": judge.notes(count),
        "about": judge.about(count),
        "settings": opened.settings,
        "computed": {"ranks": ranks, "batch_size": batch_size, "device": _device_name(device)},
        "versions": {
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in (torch, torchvision, torchmetrics)},
        },
    }


# [Note: the same figures at any number of ranks]
# The held-out samples are cut into batches once, and the batches are dealt to the ranks: whoever computes a batch,
# it is the same batch, with the noise of its samples' numbers. None is padded and none is left out, as training
# does to keep its ranks in step; here nothing is exchanged before the end. What is then gathered are rows, a few
# numbers or a feature vector a picture, which are put in the order of the samples before anything is summed, and
# sums of whole numbers. So one rank and ten get the same figures, and so do batches of another size up to the
# rounding of the networks' float32.
#
# [Note: one gathering]
# It goes through gloo on GPUs as well: there is one, of tensors that are in main memory already.


def _made(
    opened: Opened, batches: list[range], count: int, device: str, workers: int = 0
) -> Iterator[tuple[range, dict[str, Made]]]:
    """Batches of sample numbers with what the game makes of them."""
    picks = [[(0, number) for number in numbers] for numbers in batches]
    loader = DataLoader(Prepared(opened.run.data.val), batch_sampler=picks, num_workers=workers)
    for numbers, batch in zip(batches, loader, strict=True):
        batch = {name: value.to(device) for name, value in batch.items() if isinstance(value, Tensor)}
        with noise.at(noise.Place(("evaluate",), numbers[0], len(numbers), count)):
            made = makes(opened.run.game, batch, torch.tensor(numbers))
        yield numbers, made


def _whole(parts: list[Part], title: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The rows of all pictures in their order, and the sums over all ranks."""
    rows: dict[str, dict[int, Tensor]] = defaultdict(dict)
    sums: dict[str, Tensor] = {}
    for part in parts:
        for (of, name), found in part.rows.items():
            if of == title:
                rows[name] |= found
        for (of, name), found in part.sums.items():
            if of == title:
                sums[name] = sums.get(name, 0) + found
    return {name: torch.cat([found[first] for first in sorted(found)]) for name, found in rows.items()}, sums


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gather(part: Part) -> list[Part] | None:
    """The parts of all ranks, on the first."""
    if _ranks() == 1:
        return [part]
    parts = [None] * _ranks() if _rank() == 0 else None
    dist.gather_object(part, parts)
    return parts


def _broadcast(value: T) -> T:
    """The first rank's value, on all."""
    values = [value]
    if _ranks() > 1:
        dist.broadcast_object_list(values)
    return values[0]


def table(result: dict[str, Any]) -> str:
    """The scores for people: a column a task, and below what was left out and what to mind."""
    scores = result["scores"]
    network = result["about"].get("features", {}).get("network", "")
    lines = [
        f"{result['folder']}, step {result['step']}: {result['pictures']} of {result['held_out']} held-out pictures",
        f"{'':{WIDTH}}" + "".join(f"{title:>16}" for title in scores),
    ]
    for name, title in ROWS.items():
        values = [figures.get(name) for figures in scores.values()]
        if any(value is not None for value in values):
            title += f" by {network}" if name.endswith("_distance") else ""
            cells = ("–" if value is None else f"{value:.5g}" for value in values)
            lines.append(f"{title:{WIDTH}}" + "".join(f"{cell:>16}" for cell in cells))
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in result["left_out"].items():
        reasons[reason].append(name)
    lines += [f"without {' and '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in result["notes"])])


def save(result: dict[str, Any], path: Path) -> None:
    """Write the JSON, whole or not at all; what is not finite becomes a word, since JSON has no numbers for it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(_plain(result), indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    part.replace(path)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value if isinstance(value, str | int | None) else str(value)


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _names(text: str) -> tuple[str, ...]:
    """The scores of a list with commas."""
    names = () if text == "all" else tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in NEEDS:
            raise UserError(f"--scores: there is no score '{name}'; known: {', '.join(NEEDS)}, or all")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers of a list with commas."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise UserError(f"--ignore-labels {text}: type numbers with commas, such as 0,182") from error
