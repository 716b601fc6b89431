"""What a run writes down: metrics.csv, a row a logged step, and a picture of its curves."""

import csv
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only

from gan.fit.folder import RunFolder


class Record(Logger):
    """A Lightning logger that outlives interruptions.

    By hand, because Lightning's CSVLogger empties the file of a run that is resumed. Here a resumed run keeps
    its rows up to the step it resumes from and goes on below them.
    """

    def __init__(self, folder: RunFolder) -> None:
        super().__init__()
        self.folder = folder
        self.columns: list[str] = ["step"]
        self.rows: dict[int, dict[str, float]] = {}
        self._fresh = True
        self._written = 0

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.path.name

    @property
    def version(self) -> str:
        """A run has one."""
        return ""

    @property
    def save_dir(self) -> str:
        """Where Lightning thinks that this run writes."""
        return str(self.folder.path)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """The settings are already in a file of their own."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Take in some metrics of a step; a step's row is written when the next one comes."""
        if self._fresh:
            self._take_up(step)
        if step not in self.rows:
            self.save()
        elif step in list(self.rows)[: self._written]:
            self._written = 0  # a validation adds to a row that is on the disk already
        row = self.rows.setdefault(step, {})
        row.update({name: value for name, value in metrics.items() if name != "epoch"})

    def _take_up(self, step: int) -> None:
        """A resumed run forgets the rows that its interrupted self wrote beyond the checkpoint."""
        self._fresh = False
        self.rows = {number: row for number, row in read(self.folder.metrics).items() if number < step}

    @rank_zero_only
    def save(self) -> None:
        """Bring the file up to date: add lines where that is enough, write it anew where columns were added."""
        if not self.rows:
            return  # Lightning may ask before anything was logged
        names = sorted({name for row in self.rows.values() for name in row} - set(self.columns))
        anew = bool(names) or self._written == 0
        self.columns += names
        if anew:
            self._written = 0
        with self.folder.metrics.open("w" if anew else "a", newline="") as file:
            writer = csv.DictWriter(file, self.columns, restval="")
            if anew:
                writer.writeheader()
            for step, row in list(self.rows.items())[self._written :]:
                writer.writerow({"step": step, **{name: f"{value:.6g}" for name, value in row.items()}})
        self._written = len(self.rows)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """The last row, too."""
        self.save()


def read(path: Path) -> dict[int, dict[str, float]]:
    """The rows of a metrics file by step; an absent file has none."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        int(row["step"]): {name: float(value) for name, value in row.items() if name != "step" and value}
        for row in rows
    }


Panel = dict[str, list[tuple[int, float]]]


def panels(rows: dict[int, dict[str, float]]) -> dict[str, Panel]:
    """The curves of each phase's losses, of the gradient norms and of the held-out scores."""
    found: dict[str, Panel] = defaultdict(lambda: defaultdict(list))
    for step, row in sorted(rows.items()):
        for name, value in row.items():
            group, _, label = name.rpartition("/")
            if label.endswith("_grad_norm"):
                group, label = "gradient norms", f"{group}: {label.removesuffix('_grad_norm')}"
            found[group or "other"][label].append((step, value))
    order = sorted(found, key=lambda group: (group == "gradient norms", group == "val", group))
    return {{"val": "held-out scores"}.get(group, group): dict(sorted(found[group].items())) for group in order}


def draw_curves(rows: dict[int, dict[str, float]], path: Path, title: str) -> None:
    """All panels in one picture."""
    if found := panels(rows):
        draw_panels(found, path, title)


def draw_panels(panels: dict[str, Panel], path: Path, title: str = "") -> None:
    """Some panels in one picture, of the kind that the path's suffix says."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(6.4 * columns, 3.4 * lines), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title)
    for number, (group, panel) in enumerate(panels.items()):
        axes = figure.add_subplot(lines, columns, number + 1)
        for colour, (label, points) in enumerate(panel.items()):
            steps, values = np.array(points).T
            axes.plot(steps, values, color=f"C{colour}", alpha=0.25, linewidth=0.8)
            axes.plot(steps, _smooth(values), color=f"C{colour}", label=label, marker="." if len(steps) < 30 else None)
        everything = np.concatenate([np.array(points)[:, 1] for points in panel.values()])
        everything = everything[np.isfinite(everything)]
        if len(everything) and everything.min() > 0 and everything.max() > 50 * everything.min():
            axes.set_yscale("log")
        axes.set(title=group, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)


def _smooth(values: np.ndarray) -> np.ndarray:
    """A running mean over a twentieth of the curve."""
    width = max(1, len(values) // 20)
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - width)
    return (sums[ends] - sums[starts]) / (ends - starts)
