"""The figures of a grid as a picture: speed, memory and payload by the number of parts."""

from collections.abc import Callable
from pathlib import Path

from gan.bench.grid.cells import Cell
from gan.bench.grid.measuring import Figures, Rounds

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
