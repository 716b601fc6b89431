"""The same work under policies x processes x stages x chunks x batch sizes: speed, memory, payload and bubble."""

import os
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from jsonargparse.typing import PositiveFloat, PositiveInt

from gan.app.outputs import quiet
from gan.app.run import run_options
from gan.app.run.options import parameters, run_settings
from gan.app.run.parser import Parser
from gan.bench.grid import command, table, worker
from gan.bench.grid.measuring import Cell, Rounds, cells, planned, refuse_strategy
from gan.bench.grid.worker import Found, Request
from gan.files.errors import UserError
from gan.runs import find, short_name
from strategies.processes import world

BLOCKS = "gan.bench.grid.game:blocks"
BATCH_SIZE = "batch_size"
POLICIES = ("ddp", "zero3", "fsdp", "generator=pipeline,*=ddp", "pipeline")
RUN = "what is played: a run of gan.fit --list-runs, or FILE.py:FUNCTION of your own"

EXAMPLES = """examples:
  python -m gan.bench grid                                           a few minutes; a game of alike blocks
  python -m gan.bench grid --policies ddp 'generator=pipeline,*=ddp' --chunks 1,2,4,8 --batch-sizes 8,32
  python -m gan.bench grid --processes 2,4 --stages 2,4 --policies pipeline+recompute
  python -m gan.bench grid --width 256 --generator-blocks 4          larger blocks
  python -m gan.bench grid r3gan-faces --policies ddp generator=pipeline,discriminator=zero3
  python -m gan.bench grid r3gan-faces --help                        the settings of that run

Each cell is trained in processes of its own, of one thread on a CPU. Cells take turns, round by round. One process is
always measured. A cell that is impossible says why.
"""


def parse(argv: list[str]) -> Namespace:
    """The settings; lists of numbers are lists, and `policies` is a list of strategies."""
    settings = run_options.parse(
        argv,
        _add_own,
        default=BLOCKS,
        what=RUN,
        without={BATCH_SIZE},
        prog="python -m gan.bench grid",
        usage="python -m gan.bench grid [RUN] [--policies POLICY...] [--processes N,N] [--chunks N,N] [options]",
        description="Train the same work under policies x processes x stages x chunks x batch sizes, and compare.",
        epilog=EXAMPLES,
    )
    if BATCH_SIZE not in parameters(settings.run):
        raise UserError(
            f"{settings.run} has no argument '{BATCH_SIZE}', which the grid varies; write "
            f"def {find(settings.run).__name__}({BATCH_SIZE}: int = 32, ...)"
        )
    settings.policies = run_options.strategies(settings.policies)
    for name in ("processes", "chunks", "batch_sizes"):
        settings[name] = run_options.numbers(name, settings[name])
    settings.stages = [None] if settings.stages is None else run_options.numbers("stages", settings.stages)
    return settings


def _add_own(parser: Parser) -> None:
    add = parser.add_argument
    what = "policies, as for gan.fit --strategy, with commas or spaces between them"
    add("--policies", nargs="+", type=str, default=list(POLICIES), help=what)
    ranks = "2" if (os.cpu_count() or 1) < 4 else "2,4"
    add("--processes", type=str, default=ranks, help="numbers of ranks, beside one process")
    add("--stages", type=str | None, default=None, help="numbers of stages of a pipeline; default: as many as ranks")
    what = "in how many parts a pipeline takes its samples; other strategies play as many micro-batches"
    add("--chunks", type=str, default="1,4", help=what)
    add("--batch_sizes", type=str, default="32", help="samples a step, of all ranks together")
    add("--rounds", type=PositiveInt, default=3, help="how often each cell is trained")
    add("--steps", type=PositiveInt, default=8, help="steps that are timed in each training")
    add("--warm", type=PositiveInt, default=3, help="steps before them")
    add("--limit", type=PositiveFloat, default=300.0, help="seconds after which a training is said to hang")
    add("--out", type=str, default="grid", help="folder for grid.csv and grid.png")


def main(argv: list[str]) -> int:
    """Train every cell some rounds, print a table, and write it with a table."""
    quiet()
    settings = command.parse(argv)
    for strategy in settings.policies:
        refuse_strategy(strategy)
    folder = Path(settings.out)
    folder.mkdir(parents=True, exist_ok=True)
    rounds = measured(settings)
    title = f"{short_name(settings.run)}: processes of one thread on {os.cpu_count()} cores, {settings.rounds} rounds"
    print(f"\n{title}, load {os.getloadavg()[0]:.1f} at the end\n\n{table.WORDS}", flush=True)
    print("\n".join(table.lines(rounds)))
    table.write(rounds, folder / "grid.csv")
    table.draw(rounds, folder / "grid.png", title)
    print(f"\nwritten: {folder / 'grid.csv'}, {folder / 'grid.png'}")
    return 0


def measured(settings: Namespace) -> Rounds:
    """Play all rounds, and say how far it is."""
    own = run_settings(settings)

    def settings_of(cell: Cell) -> dict[str, Any]:
        return {**own, command.BATCH_SIZE: cell.batch_size}

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
