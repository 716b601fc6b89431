"""`python -m gan.evaluate RUN`: scores of the pictures that a run makes, as a table and as JSON."""

import itertools
import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt

from gan.app.command import command, on_ranks
from gan.app.outputs import run, say
from gan.app.run import command_line, options
from gan.app.run.parser import Parser, items, listed
from gan.app.scoring.names import COMPARED, NEEDS, TITLES, TRAINED_ON, against
from gan.files.disk import write_whole
from gan.files.errors import explained
from gan.files.errors import table as lines_of

Scores = listed("Scores", "|".join(["all", *NEEDS]), f"all, or some of {','.join(NEEDS)}")
Labels = listed("Labels", r"\d*", "numbers with commas, such as 0,182")


def table(result: dict[str, Any]) -> str:
    """The scores to read: a column a task, and below it which scores are missing and why, and notes."""
    scores = result["scores"]
    counts = f"{result['pictures']} {'made, against' if TRAINED_ON in result['true'] else 'of'} {result['true']}"
    rows = [("", *scores)]
    for name in TITLES:
        values = [figures.get(name) for figures in scores.values()]
        if any(value is not None for value in values):
            rows.append((TITLES[name], *("–" if value is None else f"{value:.5g}" for value in values)))
    lines = [f"{result['folder']}, step {result['step']}: {counts}", *lines_of(rows)]
    if any(name in COMPARED for figures in scores.values() for name in figures):
        network = result["about"]["features"]["network"]
        lines.append(f"distances, precision and recall are by {network}, {against(result['true'])}")
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, reason in result["left_out"].items():
        reasons[reason].append(name)
    lines += [f"without {' and '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in result["notes"])])


def save(result: dict[str, Any], path: Path) -> None:
    """Write the JSON. Infinities and NaN become strings, since JSON has no numbers for them.

    A file of before is kept under a name with a number: the new one may have other scores, or those of fewer pictures.
    """
    plain = json.loads(json.dumps(result, default=str), parse_constant=lambda word: str(float(word)))
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(1))
    with explained(f"cannot write '{path}': {{why}}; the scores are in the table above", OSError):
        if path.is_file():
            path.rename(next(name for name in numbered if not name.exists()))
        write_whole(path, json.dumps(plain, indent=2, ensure_ascii=False) + "\n")


EXAMPLES = """examples:
  python -m gan.evaluate                                    the newest run
  python -m gan.evaluate runs/001-sean-faces --scores ssim,psnr
  python -m gan.evaluate RUN --against held-out             a game from noise, on pictures that it has not seen
  python -m gan.evaluate RUN --inception torch-fidelity --devices 4
  python -m gan.evaluate RUN --segmenter deeplabv3.pth      mIoU by a state dict of torchvision's
  torchrun --nproc-per-node 4 -m gan.evaluate RUN
"""


@command
def main(argv: list[str]) -> None:
    request = parse(argv)
    on_ranks("gan.evaluate", argv, request.accelerator, request.devices, partial(_evaluate, request))


def parse(argv: list[str] | None = None) -> Namespace:
    what = "Score what a run makes of its held-out samples, or from noise: a table, and JSON in the run's folder."
    parser = Parser("python -m gan.evaluate", "[RUN] [--scores LIST] [--devices N] [options]", what, EXAMPLES)
    options.add_saved_run(parser)
    add = parser.option
    add("--scores", Scores, f"some of {','.join(NEEDS)}; default: all that are possible", "all")
    add("--inception", Path, options.INCEPTION)
    add("--lpips", Path, "weights for LPIPS: VGG-16's as torchvision publishes them, vgg16-397923af.pth")
    add("--segmenter", Path, "weights for mIoU: a state dict of a torchvision segmentation network")
    add("--ignore_labels", Labels, "labels whose pixels mIoU leaves out, such as 0,182", "")
    what = "true pictures: train (all trained on, as published; default for games from noise) or held-out"
    add("--against", Literal["train", "held-out"], what)
    what = "score only this many held-out samples, always the same; or make so many, 50,000 at most by default"
    add("--count", PositiveInt, what)
    add("--batch_size", PositiveInt, "pictures at a time on each device; changes only the speed", 8)
    what = "processes; auto: all GPUs, or two on CPU; 0,2 (and 2, alone): these GPUs"
    add("--devices", options.Devices, what, "auto")
    add("--accelerator", str, options.ACCELERATOR, "auto")
    request = options.parse_saved_run(parser, command_line.arguments(argv))
    request.scores = () if request.scores == "all" else tuple(items(request.scores))
    request.ignore_labels = tuple(map(int, filter(None, items(request.ignore_labels))))
    return request


def _evaluate(request: Namespace, device: str) -> None:
    """The work of one process; the first one prints and saves the result."""
    from gan.app.run.reopen import open_run, open_together
    from gan.app.scoring.scoring import evaluate

    opened = open_together(
        lambda which: open_run(which, request.out, device, request.data, request.run),
        request.which,
        lambda opened: opened.checkpoint,
    )
    names = ("scores", "inception", "lpips", "segmenter", "against", "count", "batch_size")
    asked = {name: request[name] for name in names}
    result = evaluate(opened, ignore=request.ignore_labels, device=device, **asked)
    if result is not None:
        *_, path = opened.folder.evaluations(opened.step)
        say(table(result))
        save(result, path)
        say(f"saved in {path}")


if __name__ == "__main__":
    run(main)
