"""What is refused before the first process is started: all that is known without one, and without the game."""

import errno
import os
from pathlib import Path

from jsonargparse import Namespace

from datasets.batches import check_divides
from gan.app.run.options import nodes
from gan.files.errors import UserError
from gan.files.system import resource
from gan.runs import RUNS
from strategies import PhaseStrategy
from strategies.assignment import check_groups, check_ranks
from strategies.placing.placement import placement_of

# Without file handles a rank may wait for ever: a loader's worker sends each tensor by a handle, and multiprocessing
# waits without a limit for the one that cannot be sent. So too few are refused before the first process is started.

FILES = 256  # open files of a rank: its libraries, logs, checkpoint, connections to a few others
OF_A_WORKER = 64  # more for each worker of the loaders: pipes, and the tensors of the batches that it has prepared
NO_MORE = ("can't start new thread", "Resource temporarily unavailable")  # Python's words, and those of C
OF_A_RANK = 16  # more for each rank of the run: connections of each process group


def allow_files(workers: int, ranks: int) -> None:
    """Let this process, and those that it starts, open the files that a rank needs. Refuse if the shell forbids it."""
    if resource is None:  # Windows has no such limit
        return
    least = FILES + OF_A_WORKER * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = least + OF_A_RANK * ranks
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    soft = wanted if hard == resource.RLIM_INFINITY else max(soft, min(hard, wanted))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < least:
        raise UserError(
            f"too many open files: this shell allows a process {soft}, and a rank with {workers} workers needs "
            f"{least}; type ulimit -n {max(4096, least)}"
        )


def named(error: BaseException | None) -> UserError | None:
    """The error of a user whose shell allows too little, if that is what this error, or its cause, says."""
    if error is None or isinstance(error, UserError):
        return None
    number, text = getattr(error, "errno", None), str(error)
    if resource and (number in (errno.EMFILE, errno.ENFILE) or "Too many open files" in text):
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        more = max(4096, 4 * allowed)
        return UserError(f"too many open files: this shell allows a process {allowed}; type ulimit -n {more}")
    if any(words in text for words in NO_MORE):
        return UserError(
            f"no more processes or threads can be started ({text}); type ulimit -u unlimited, or fewer --devices or "
            f"--workers"
        )
    return named(error.__cause__ or (None if error.__suppress_context__ else error.__context__))


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
