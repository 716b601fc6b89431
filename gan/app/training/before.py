"""What is refused before the first process is started: all that is known without one, and without the game."""

import tempfile

from jsonargparse import Namespace

from datasets.batches import check_divides
from datasets.files.find import check_there
from datasets.workers import MOST
from gan.app.run.options import nodes
from gan.files.errors import UserError
from gan.files.system import cores, resource
from strategies import PhaseStrategy
from strategies.assignment import check_ranks
from strategies.placing.division import placement_of

FILES = 256  # open files of a rank: its libraries, logs, checkpoint, connections to a few others
OF_A_WORKER = 64  # more for each worker of the loaders: pipes, and the tensors of the batches that it has prepared
LONGEST = 72  # letters of the folder for temporary files: a socket of 107, less on macOS, lies two folders below
OF_A_RANK = 16  # more for each rank of the run: connections of each process group
EACH_CPU = 16  # CPU ranks on each core: more would only wait for each other, and each takes some 400 MB


def allow_files(settings: Namespace, ranks: int) -> None:
    """Let this process, and those that it starts, open the files that a rank needs. Refuse if the shell forbids it.

    Without file handles a rank may wait for ever: a loader's worker sends each tensor by a handle, and multiprocessing
    waits without a limit for the one that cannot be sent.
    """
    workers = settings.get("workers", 0)
    workers = workers if isinstance(workers, int) else MOST
    if resource is None:  # Windows has no such limits
        return
    if workers and len(where := tempfile.gettempdir()) > LONGEST:
        raise UserError(
            f"the folder for temporary files has a name of {len(where)} letters, which is too long for the sockets of "
            f"loaders' workers: {where}; type export TMPDIR=/tmp, or --workers 0"
        )
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


def check(settings: Namespace, strategy: PhaseStrategy, devices: int, on_cpu: bool) -> None:
    there = cores()
    if on_cpu and devices > EACH_CPU * there:
        raise UserError(
            f"--devices {devices} would be {devices} processes on {there} CPU cores; type --devices {there}, and "
            f"{EACH_CPU * there} at most"
        )
    least, most = nodes(settings.nodes)
    batch = settings.get("batch_size")
    if least == most:  # else the number of ranks is known when the hosts have met
        ranks = devices * most
        placement = placement_of(strategy.choice, ranks)
        check_ranks(strategy.choice, ranks, placement)
        if ":" not in settings.run and isinstance(batch, int):  # an own run may mean something else by it
            check_divides(batch, ranks if placement is None else len(placement.training), "--batch-size ")
    data = settings.get("data")
    if ":" not in settings.run and isinstance(data, str):
        check_there(data)
