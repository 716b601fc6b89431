"""The figures of a grid as a table, and as a CSV file."""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path

from gan.bench.grid.measuring import Cell, Figures, Rounds

WORDS = """  of one      pictures a second, as a part of those of one process of one thread that plays the same parts
              one after another; the median of all rounds, and the least and the most of them
  fastest     the same of the fastest round of each, for a machine that others use too
  of its best as of one, but of one process with the fastest number of parts
  work        how long the rank computes that computes longest, as a part of one process: without waiting for others or
              for a core, so other users of the machine hardly change it
  memory      the peak of a rank above what it had before the game was made, as a part of one process's, and in MB
  waits       the share of the time in which a rank waits for others and their messages
  no core     the share in which it could compute, but others have the cores: more than a little spoils the figures
  bubble      the share of a pass through the pipeline in which a rank must wait, by the schedule
  payload     the bytes that a rank gives to collectives and messages, or gets from them, in a step
  planned     the peak and the payload that gan.plan says, as parts of the measured ones. A plan counts tensors; the
              measured peak also has what torch, gloo and the allocator keep, and a plan of a pipeline counts all of a
              rank's activations, as if it had no stages"""

COLUMNS = (
    "batch_size",
    "parts",
    "strategy",
    "processes",
    "stages",
    "of_one",
    "of_one_least",
    "of_one_most",
    "of_one_fastest",
    "of_its_best",
    "work_of_one",
    "memory_of_one",
    "pictures_per_second",
    "peak_memory_bytes",
    "bubble",
    "waits",
    "no_core",
    "payload_bytes",
    "planned_peak_bytes",
    "planned_payload_bytes",
    "why_not",
)


def lines(rounds: Rounds) -> Iterator[str]:
    """A table for each batch size, and below them why some cells are impossible."""
    width = max(len(cell.title) for cell in rounds.cells)
    head = (
        f"{'parts':>5}  {'strategy':{width}}{'ranks':>7}{'stages':>8}{'of one':>9}{'least-most':>13}{'fastest':>9}"
        f"{'of its best':>13}{'work':>7}{'memory':>9}{'MB':>7}{'bubble':>8}{'waits':>7}{'no core':>9}"
        f"{'payload, kB':>13}{'planned':>14}{'pictures/s':>12}"
    )
    reasons = list(dict.fromkeys(rounds.why.values()))
    for batch_size in dict.fromkeys(cell.batch_size for cell in rounds.cells):
        yield f"\nbatches of {batch_size}"
        yield head
        for cell in rounds.cells:
            if cell.batch_size == batch_size:
                place = f"{cell.chunks:5}  {cell.title:{width}}{cell.processes:7}{_stages(cell):>8}"
                if cell in rounds.why:
                    yield f"{place}   impossible, see ({1 + reasons.index(rounds.why[cell])})"
                else:
                    yield place + _figures(rounds.figures(cell))
    if reasons:
        yield ""
    yield from (f"({number}) {reason}" for number, reason in enumerate(reasons, 1))


def _stages(cell: Cell) -> str:
    if not cell.piped:
        return ""
    return "auto" if cell.stages is None else str(cell.stages)


def _figures(found: Figures) -> str:
    least, ratio, most = found.ratio or (None, None, None)
    spread = "" if least is None else f"{least:.2f}-{most:.2f}"
    return (
        f"{_two(ratio):>9}{spread:>13}{_two(found.fastest):>9}{_two(found.of_best):>13}{_two(found.work):>7}{_two(found.memory):>9}"
        f"{found.peak / 1e6:7.0f}{'' if found.bubble is None else f'{found.bubble:.0%}':>8}"
        f"{found.waits:7.0%}{found.queues:9.0%}{found.payload / 1000:13.1f}{_planned(found):>14}{found.rate:12.1f}"
    )


def _planned(found: Figures) -> str:
    if found.planned is None:
        return ""
    peak = f"{found.planned.peak / max(1, found.peak):.2f}"
    return f"{peak}, {found.planned.payload / found.payload:.2f}" if found.payload else peak


def _two(number: float | None) -> str:
    return "" if number is None else f"{number:.2f}"


def write(rounds: Rounds, path: Path) -> None:
    """All cells, one in a row. A figure that is not known is empty."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for cell in rounds.cells:
            stages = "" if cell.stages is None else cell.stages
            row = [cell.batch_size, cell.chunks, cell.title, cell.processes, stages]
            if cell in rounds.why:
                row += [""] * (len(COLUMNS) - len(row) - 1) + [rounds.why[cell]]
            else:
                found = rounds.figures(cell)
                least, ratio, most = found.ratio or (None, None, None)
                numbers = (
                    ratio,
                    least,
                    most,
                    found.fastest,
                    found.of_best,
                    found.work,
                    found.memory,
                    found.rate,
                    found.peak,
                )
                row += map(_four, (*numbers, found.bubble, found.waits, found.queues, found.payload))
                plan = found.planned
                row += ["", ""] if plan is None else [f"{plan.peak:.0f}", f"{plan.payload:.0f}"]
                row += [""]
            writer.writerow(row)


def _four(number: float | None) -> str:
    return "" if number is None else f"{number:.4f}" if isinstance(number, float) else str(number)


PANELS: dict[str, Callable[[Figures], float | None]] = {
    "pictures a second, of one process": lambda found: found.ratio and found.ratio[1],
    "peak memory of a rank, of one process": lambda found: found.memory,
    "payload of a rank in a step, MB": lambda found: found.payload / 1e6,
}
OF_ONE = 2  # so many panels are compared with one process


def draw(rounds: Rounds, path: Path, title: str) -> None:
    """A row of panels for each batch size, and a line for each strategy on so many ranks, in so many stages."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batch_sizes = list(dict.fromkeys(cell.batch_size for cell in rounds.cells))
    parts = list(dict.fromkeys(cell.chunks for cell in rounds.cells))
    played = [cell for cell in rounds.cells if cell not in rounds.why]
    names = list(dict.fromkeys(label(cell) for cell in played if cell != cell.one))
    figure = Figure(figsize=(4.6 * len(PANELS), 3.2 * len(batch_sizes) + 0.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    grid = figure.subplots(len(batch_sizes), len(PANELS), squeeze=False)
    for row, batch_size in zip(grid, batch_sizes, strict=True):
        for number, (axes, (heading, figure_of)) in enumerate(zip(row, PANELS.items(), strict=True)):
            if number < OF_ONE:
                axes.axhline(1.0, color="black", linewidth=0.8, label="one process")
            for colour, name in enumerate(names):
                mine = [cell for cell in played if cell.batch_size == batch_size and label(cell) == name]
                points = [(cell, rounds.figures(cell)) for cell in mine]
                points = [(cell, found) for cell, found in points if figure_of(found) is not None]
                if not points:
                    continue
                beside = 0.04 * (colour - (len(names) - 1) / 2)  # so that no line hides another
                places = [parts.index(cell.chunks) + beside for cell, _ in points]
                values = [figure_of(found) for _, found in points]
                axes.plot(places, values, color=f"C{colour % 10}", marker="o", markersize=4, label=name)
                if number == 0:
                    # The rounds in between.
                    ends = [(found.ratio[0], found.ratio[2]) for _, found in points]
                    axes.vlines(places, *zip(*ends, strict=True), color=f"C{colour % 10}", alpha=0.4)
            axes.set_xticks(range(len(parts)), list(map(str, parts)))
            axes.set_xlim(-0.3, len(parts) - 0.7)
            axes.set_ylim(bottom=0)
            axes.set(title=f"batches of {batch_size}: {heading}" if number == 0 else heading, xlabel="parts")
            axes.title.set_fontsize("small")
            axes.grid(alpha=0.3)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path)


def label(cell: Cell) -> str:
    stages = "" if cell.stages is None else f", {cell.stages} stages"
    return f"{cell.title} on {cell.processes}{stages}"
