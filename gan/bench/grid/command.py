"""The same work under policies x processes x stages x chunks x batch sizes: speed, memory, payload and bubble."""

import os
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from gan.bench.grid import chart, options, table, worker
from gan.bench.grid.cells import Cell, cells, refuse_strategy
from gan.bench.grid.measuring import Rounds
from gan.bench.grid.planned import planned
from gan.bench.grid.worker import Found, Request
from gan.fit.command import quiet
from gan.fit.options import run_settings
from gan.runs import short_name
from strategies.processes import world


def main(argv: list[str]) -> int:
    """Train every cell some rounds, print a table, and write it with a chart."""
    quiet()
    settings = options.parse(argv)
    for strategy in settings.policies:
        refuse_strategy(strategy)
    folder = Path(settings.out)
    folder.mkdir(parents=True, exist_ok=True)
    rounds = measured(settings)
    title = f"{short_name(settings.run)}: processes of one thread on {os.cpu_count()} cores, {settings.rounds} rounds"
    print(f"\n{title}, load {os.getloadavg()[0]:.1f} at the end\n\n{table.WORDS}", flush=True)
    print("\n".join(table.lines(rounds)))
    table.write(rounds, folder / "grid.csv")
    chart.draw(rounds, folder / "grid.png", title)
    print(f"\nwritten: {folder / 'grid.csv'}, {folder / 'grid.png'}")
    return 0


def measured(settings: Namespace) -> Rounds:
    """Play all rounds, and say how far it is."""
    own = run_settings(settings)

    def settings_of(cell: Cell) -> dict[str, Any]:
        return {**own, options.BATCH_SIZE: cell.batch_size}

    def play(cell: Cell) -> list[Found]:
        request = Request(
            settings.run,
            settings_of(cell),
            cell.typed,
            cell.processes,
            cell.micro_batches,
            settings.warm,
            settings.steps,
        )
        ranks, limit = cell.processes, settings.limit
        return world.call(worker.play, request, ranks=ranks, limit=limit, preload=[worker.__name__])

    dials = settings.policies, settings.processes, settings.stages, settings.chunks, settings.batch_sizes
    rounds = Rounds(
        list(cells(*dials)), settings.steps, play, lambda cell: planned(settings.run, settings_of(cell), cell)
    )
    print(f"{len(rounds.cells)} cells, {settings.rounds} rounds; load {os.getloadavg()[0]:.1f}", flush=True)
    for number in range(1, settings.rounds + 1):
        for cell, words in rounds.round():
            where = f"round {number} of {settings.rounds}: {cell.typed} on {cell.processes}, {_parts(cell)}"
            print(f"{where}: {words}", flush=True)
    return rounds


def _parts(cell: Cell) -> str:
    return f"{cell.batch_size} in {cell.chunks} {'part' if cell.chunks == 1 else 'parts'}"
