"""The metrics of a run: metrics.csv, with one row for each logged step, and the picture of its curves."""

import csv
import io
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning import Trainer
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

from gan.app.outputs import say
from gan.app.run.folder import RunFolder
from gan.files.disk import write_whole
from gan.files.errors import UserError, printable, reason

_said: set[tuple[Path, str]] = set()  # what could not be written, by its folder and its kind


@contextmanager
def best_effort(path: Path, kind: str = "", deed: str = "written") -> Iterator[None]:
    """Inside the `with`, a file is written. A failure ends only that, and is said the first time for each kind of file.

    `kind` stands for files such as this.
    """
    try:
        yield
    except OSError as error:
        if (what := (path.parent, kind or path.name)) not in _said:
            _said.add(what)
            warn(f"{path} cannot be {deed} ({reason(error)}); training goes on")


def write(path: Path, text: str) -> None:
    with best_effort(path):
        write_whole(path, text)


def write_json(path: Path, said: object) -> None:
    write(path, json.dumps(said, indent=1) + "\n")


def warn(text: str) -> None:
    print(f"\nwarning: {text}", file=sys.stderr, flush=True)


class Record(Logger):
    """A Lightning logger that writes metrics.csv and continues the file when a run is resumed.

    It is written by hand, because Lightning's CSVLogger empties the file of a resumed run. Here a resumed run keeps
    the rows up to the step it resumes from, and adds its own below them. If the file cannot be written, training goes
    on, and the next time that it can be, all rows are.
    """

    version = ""  # a run has only one

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.folder = folder
        self.columns: list[str] = ["step"]
        self.rows: dict[int, dict[str, float]] = {}
        self._fresh = True
        self._written = 0  # so many rows are in the file; with 0 all are written

    @property
    def name(self) -> str:
        return self.folder.path.name

    @property
    def save_dir(self) -> str:
        return str(self.folder.path)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the settings are in settings.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Add metrics to the row of a step, which Lightning numbers from 0: row 0 is before the first step.

        The row is written when the next step comes.
        """
        if step is None:
            raise UserError("metrics.csv has a row a step; type self.logger.log_metrics(metrics, step=self.step)")
        number = step + 1
        if self._fresh:
            self.take_up(step)
        if number not in self.rows:
            self.save()
        elif number in list(self.rows)[: self._written]:
            self._written = 0  # a validation adds to a row that is already in the file, so write all rows again
        self.rows.setdefault(number, {}).update({name: value for name, value in metrics.items() if name != "epoch"})

    @rank_zero_only
    def take_up(self, step: int) -> None:
        """Read the rows up to the step that is resumed from. A copy keeps later ones if their checkpoints stay."""
        self._fresh = False
        try:
            found = read(self.folder.metrics)
        except UserError as error:
            found, aside = {}, self.folder.metrics.with_name("metrics-damaged.csv")
            with best_effort(aside):
                self.folder.metrics.replace(aside)
                warn(f"{error}; it is now {aside.name}, and a new file begins")
        self.columns = ["step", *dict.fromkeys(name for row in found.values() for name in row)]
        last = max(found, default=-1)
        if min(last, max(self.folder.steps(), default=-1)) > step:
            aside = self.folder.metrics.with_name(f"metrics-to-step-{last:06d}.csv")
            with best_effort(aside):
                shutil.copyfile(self.folder.metrics, aside)
                say(f"metrics.csv goes on from step {step}; {aside.name} keeps its later rows")
        self.rows = {number: row for number, row in found.items() if number <= step}

    @rank_zero_only
    def save(self) -> None:
        """Update the file: append rows, or write all of it again if there are new columns."""
        if not self.rows:
            return  # Lightning may call it before anything was logged
        names = sorted({name for row in self.rows.values() for name in row} - set(self.columns))
        self.columns += names
        there, self._written = 0 if names else self._written, 0
        with best_effort(self.folder.metrics):
            if there:
                with self.folder.metrics.open("a", encoding="utf-8", newline="") as file:
                    file.write(self._text(there))
            else:
                write_whole(self.folder.metrics, self._text(0))
            self._written = len(self.rows)

    def _text(self, first: int) -> str:
        """The rows from this one on, and above the first one of all the names of the columns."""
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns, restval="")
        if not first:
            writer.writeheader()
        for step, row in list(self.rows.items())[first:]:
            writer.writerow({"step": step, **{name: f"{value:.6g}" for name, value in row.items()}})
        return text.getvalue()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()


def log(trainer: Trainer, found: Mapping[str, float]) -> None:
    """Log what was found after the last step, in that step's row."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(found), trainer.global_step - 1)


def read(path: Path, last: float = np.inf) -> dict[int, dict[str, float]]:
    """The rows of a metrics file up to a step; none if there is no file. A last line that was cut off is left out."""
    if not path.is_file():
        return {}
    try:
        with path.open(encoding="utf-8", newline="") as file:
            names, *rows = [*filter(None, csv.reader(line for line in file if line.endswith("\n")))] or [["step"]]
        named = (dict(zip(names, values, strict=True)) for values in rows)
        rows = {int(row.pop("step")): {name: float(value) for name, value in row.items() if value} for row in named}
        return {step: row for step, row in rows.items() if step <= last}
    except (OSError, csv.Error, ValueError, KeyError) as error:  # also what is no text
        raise UserError(f"'{path}' is damaged ({type(error).__name__}: {error}); remove it, or mend it") from error


def until(folder: RunFolder, step: int) -> dict[int, dict[str, float]]:
    """The rows of a run up to a checkpoint. What came after the newest one belongs to no other, so it is there too."""
    return read(folder.metrics, step if step < max(folder.steps(), default=step) else np.inf)


def first_and_last(rows: Mapping[int, Mapping[str, float]], name: str) -> tuple[float, float] | None:
    values = [row[name] for _, row in sorted(rows.items()) if name in row]
    return (values[0], values[-1]) if values else None


Panel = dict[str, list[tuple[int, float]]]

# The panels after those of phases.
LAST = ("learning rates", "gradient norms", "health", "score", "precision and recall", "val")
TITLES = {"score": "distance from the true pictures", "val": "held-out scores"}
CLOCK = ("pictures", "sounds", "seconds")  # so far: of no panel
RANGES = {"memorised": (0.0, 0.65), "told_apart": (0.55, 1.0), "diversity": (0.5, 3.0)}  # where a run is well


def panels(rows: dict[int, dict[str, float]]) -> dict[str, Panel]:
    """The curves of each phase's losses, of gradient norms and health, of scores and of the held-out scores."""
    found: dict[str, Panel] = defaultdict(lambda: defaultdict(list))
    for step, row in sorted(rows.items()):
        for name, value in row.items():
            if name in CLOCK:
                continue
            group, _, label = name.rpartition("/")
            if label in ("precision", "recall"):
                group = "precision and recall"
            elif name.startswith("lr-"):
                group, label = "learning rates", name.removeprefix("lr-")
            elif label.endswith("_grad_norm"):
                names = dict.fromkeys([group, label.removesuffix("_grad_norm")])  # often the same
                group, label = "gradient norms", ": ".join(names)
            found[group or "other"][label].append((step, value))
    order = sorted(found, key=lambda group: (LAST.index(group) if group in LAST else -1, group))
    return {TITLES.get(group, group): dict(sorted(found[group].items())) for group in order}


def clock(rows: Mapping[int, Mapping[str, float]]) -> tuple[float, str]:
    """How many thousand pictures a step has seen, 0 if it is not known; and how many in which time so far, in words."""
    step, row = max(((step, row) for step, row in rows.items() if "seconds" in row), default=(0, {}))
    kimg, time = row.get("pictures", 0.0) / 1000, tqdm.format_interval(row.get("seconds", 0.0))
    words = f"{kimg:.4g} kimg in {time}" if kimg else time if row else ""
    return kimg / max(1, step), words


def drawn(
    panels: dict[str, Panel],
    form: str,
    title: str = "",
    kimg: float = 0.0,
    xlabel: str = "step",
    changes: Mapping[int, str] | None = None,
) -> bytes:
    """One picture of these panels, as a file of that format; `kimg`, of a step, are counted above each panel.

    Steps until which a run had other settings have a dotted line, and the settings stand below the title.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    height = 3.1 + 0.15 * max(map(len, panels.values()))  # with a line of the legend for each curve
    figure = Figure(figsize=(6.4 * columns, height * lines), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        below = (_plain(f"until step {step} (dotted): {words}", 110) for step, words in (changes or {}).items())
        figure.suptitle("\n".join([_plain(title), *below]), fontsize="medium" if changes else "large")
    for number, (group, panel) in enumerate(panels.items()):
        axes = figure.add_subplot(lines, columns, number + 1)
        for colour, (label, points) in enumerate(panel.items()):
            if not points:  # the next one has the same colour in all panels
                continue
            steps, values = np.array(points).T
            axes.plot(steps, values, color=f"C{colour}", alpha=0.25, linewidth=0.8)
            name = f" {_plain(label)}"  # a legend would leave out one that begins with "_"
            shown, width = _smooth(values), 1.5
            if group == "learning rates":  # equal ones lie on each other: those below are wider
                shown, width = values, 1.5 + 2.5 * (len(panel) - 1 - colour)
            marker = "." if len(steps) < 30 else None
            axes.plot(steps, shown, color=f"C{colour}", label=name, linewidth=width, marker=marker)
            for end in {*RANGES.get(label, ())} - {0.0, 1.0} if group == "health" else ():
                axes.axhline(end, color=f"C{colour}", linestyle="--", linewidth=1, alpha=0.5)
        _scale(axes, panel, to_one=group == "health")
        names = list(dict.fromkeys([group, *panel])) if len(panel) == 1 else [group]
        axes.set(title=_plain(": ".join(names)), xlabel=xlabel)
        axes.locator_params("x", integer=xlabel == "step")
        if kimg:
            above = axes.secondary_xaxis("top", functions=(partial(np.multiply, kimg), partial(np.multiply, 1 / kimg)))
            above.set_xlabel("kimg", loc="right")
        axes.grid(alpha=0.3)
        for step in changes or ():
            axes.axvline(step, color="0.4", linestyle=":", linewidth=1)
        if len(panel) > 1:  # inside, it would hide curves
            ncols = 2 if max(map(len, panel)) <= 30 else 1
            axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=ncols, frameon=False)
    figure.savefig(content := io.BytesIO(), format=form)
    return content.getvalue()


def _scale(axes: Any, panel: Panel, to_one: bool) -> None:
    """Let large and small curves be read together, on a logarithmic axis; `to_one`: on a linear one from 0 to 1."""
    curves = [np.array([value for _, value in points if np.isfinite(value)]) for points in panel.values()]
    everything, sizes = np.concatenate(curves), [np.median(np.abs(each[each != 0])) for each in curves if each.any()]
    apart = len(sizes) > 1 and max(sizes) > 20 * min(sizes)
    if to_one:
        axes.set_ylim(0, 1.05 * max(1.0, *everything))
        axes.set_ylabel("dashed: the ends of what is well")
    elif len(everything) and everything.min() > 0 and (apart or everything.max() > 50 * everything.min()):
        axes.set_yscale("log")
    elif apart:
        axes.set_yscale("symlog", linthresh=min(sizes))


def _plain(name: str, most: int = 60) -> str:
    """The name for matplotlib, which would read what stands between two "$" as mathematics. A long one is cut."""
    half = most // 2 - 2
    name = printable(name if len(name) <= most else f"{name[:half]} … {name[-half:]}")
    return name.replace("$", r"\$")


def _smooth(values: np.ndarray) -> np.ndarray:
    """A running mean of what is finite over a window of one twentieth of the curve.

    Each window is summed by itself: in differences of one long sum, a huge value would spoil all that follow it.
    """
    finite, window = np.isfinite(values), np.ones(max(1, len(values) // 20))
    sums, counts = (np.convolve(each, window)[: len(values)] for each in (np.where(finite, values, 0.0), finite))
    return sums / np.where(counts, counts, np.nan)
