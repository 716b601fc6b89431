"""What is refused before the first process is started: all that is known without one, and without the game."""

import os
from pathlib import Path

from jsonargparse import Namespace

from datasets.batches import check_divides
from gan.app.run.limits import allow_files
from gan.app.run.options import nodes
from gan.files.errors import UserError
from gan.runs import RUNS
from strategies import PhaseStrategy
from strategies.assignment import check_groups, check_ranks
from strategies.placing.placement import placement_of

EACH_CPU = 16  # CPU ranks on each core: more would only wait for each other, and each takes some 400 MB


def check_files(settings: Namespace, ranks: int) -> None:
    """Refuse a shell that allows too few open files for the workers of each rank."""
    workers = settings.get("workers")
    allow_files(workers if isinstance(workers, int) else 0, ranks)


def check(settings: Namespace, strategy: PhaseStrategy, devices: int, on_cpu: bool) -> None:
    """Refuse what so many devices on each host cannot train."""
    cores = os.cpu_count() or 1
    if on_cpu and devices > EACH_CPU * cores:
        raise UserError(
            f"--devices {devices} would be {devices} processes on {cores} CPU cores; type --devices {cores}, and "
            f"{EACH_CPU * cores} at most"
        )
    least, most = nodes(settings.nodes)
    batch = settings.get("batch_size")
    if least == most:  # else the number of ranks is known when the hosts have met
        ranks = devices * most
        placement = placement_of(strategy.choice, ranks)
        check_ranks(strategy.choice, ranks, placement)
        if placement is None:
            check_groups(strategy.choice, ranks)
        if settings.run in RUNS and isinstance(batch, int):  # an own run may mean something else by it
            check_divides(batch, ranks if placement is None else len(placement.training), "batch", "--batch-size ")
    data = settings.get("data")
    if settings.run in RUNS and isinstance(data, str) and not Path(data).expanduser().is_dir():
        raise UserError(f"there is no folder {data}; give the folder in which the data set lies")
