"""Starting the ranks of a run: what is refused before, and what they must agree on, the folder and the checkpoint.

[Note: going on after a restart]
A launcher that lives longer than its ranks starts them again after a failure: torch's elastic agent, or Slurm, which
requeues a job. The ranks of the next attempt know only their command line, by which they would begin a new run. So the
run's folder says who has launched the run, and which checkpoints this launch has written last. The first rank looks for
a folder that one of the launchers of this attempt has begun. All launchers count, because the first host may be lost.
"""

import itertools
import json
import os
import shlex
import socket
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist
from jsonargparse import Namespace

from datasets.batches import check_divides
from datasets.files.find import check_there
from datasets.workers import MOST
from gan.app.run.folder import RunFolder
from gan.app.run.options import nodes
from gan.files.disk import read_text, write_whole
from gan.files.errors import UserError
from gan.files.system import cores, resource
from gan.runs.run import Unchosen
from strategies import PhaseStrategy
from strategies.placing.division import placement_of
from strategies.processes import agent, cluster
from strategies.processes.board import NEVER, VARIABLE, Board
from strategies.processes.failure import FILE
from strategies.processes.launchers import Launched
from strategies.training.assignment import check_ranks
from strategies.world import StoreWorld

LIMIT = 300.0  # seconds in which all ranks must have begun, and the first one have chosen
NOTED = 3  # the two newest checkpoints that are there, and one that is being written

FILES = 256  # open files of a rank: its libraries, logs, checkpoint, connections to a few others
OF_A_WORKER = 64  # more for each worker of the loaders: pipes, and the tensors of the batches that it has prepared
LONGEST = 72  # letters of the folder for temporary files: a socket of 107, less on macOS, lies two folders below
OF_A_RANK = 16  # more for each rank of the run: connections of each process group
EACH_CPU = 16  # CPU ranks on each core: more would only wait for each other, and each takes some 400 MB

_calls = itertools.count()  # a process may train several times


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


def check_settings(settings: Namespace, strategy: PhaseStrategy, devices: int, on_cpu: bool) -> None:
    """Refuse all mistakes that can be found without a process, and without the game."""
    there = cores()
    if on_cpu and devices > EACH_CPU * there:
        raise UserError(
            f"--devices {devices} would be {devices} processes on {there} CPU cores; type --devices {there}, and "
            f"{EACH_CPU * there} at most"
        )
    least, most = nodes(settings.nodes)
    batch, ranks = settings.get("batch_size"), devices * most
    if least == most:  # else the number of ranks is known when the hosts have met
        check_ranks(strategy.choice, ranks, placement_of(strategy.choice, ranks))
        typed = isinstance(batch, int) and not isinstance(batch, Unchosen)
        if ":" not in settings.run and typed:  # an own run may mean something else by it
            check_divides(batch, training_ranks(strategy, ranks), "--batch-size ")
    data = settings.get("data")
    if ":" not in settings.run and isinstance(data, str):
        check_there(data, named="classes" in settings)


def training_ranks(strategy: PhaseStrategy, ranks: int) -> int:
    """How many of the ranks train, and share a batch: all but those that serve players."""
    placement = placement_of(strategy.choice, ranks)
    return ranks if placement is None else len(placement.training)


class Refused(UserError):
    """What the first rank has refused. All ranks raise it."""

    agreed = True


@dataclass(frozen=True)
class Chosen:
    """The run that the ranks train. `again` is true if an earlier attempt of this launch has begun it."""

    folder: RunFolder
    checkpoint: Path | None = None
    again: bool = False


def launcher_of(place: Launched | None, argv: Sequence[str] = ()) -> str | None:
    """A name of who has started this rank that stays the same over restarts, and is no other launch's.

    A job in a queue may train several runs, each by a command of its own. The numbers of its steps may change.
    """
    if agent.speaks():
        return agent.name()
    if (there := torchrun_folder(place)) is not None:
        return f"torchrun {socket.gethostname()} {there}"
    if place is not None and place.launcher.queued:
        return f"{place.launcher.queued.format_map(os.environ)} {zlib.crc32(shlex.join(argv).encode()):08x}"
    return None


def begun_by(
    out: Path,
    launchers: list[str],
    pick: Callable[[list[Path]], Path] = itemgetter(0),
    hold: Callable[[RunFolder], None] = lambda _: None,
) -> Chosen | None:
    """The newest run in `out` that one of these launchers has begun. After `hold`, `pick` chooses a checkpoint."""
    folders = [RunFolder(path.parent) for path in out.glob("*/launch.json")]
    found = [(folder, record) for folder in folders if (record := _read(folder))]
    for folder, record in sorted(found, key=lambda pair: pair[0].launch.stat().st_mtime, reverse=True):
        if set(launchers) & set(record["launchers"]):
            hold(folder)
            record = _read(folder) or record
            noted = (folder.checkpoints / name for name in reversed(record["checkpoints"]))
            there = list(filter(Path.is_dir, noted))
            return Chosen(folder, pick([*there, *folder.before(there[-1])]) if there else None, again=True)
    return None


def launch_record(launchers: list[str], *checkpoints: str) -> str:
    return json.dumps({"launchers": launchers, "checkpoints": checkpoints[-NOTED:]}, indent=1) + "\n"


def note_checkpoint(folder: RunFolder, checkpoint: Path) -> None:
    """This launch saves a checkpoint, from which its next attempt goes on if it has become whole."""
    if record := _read(folder):
        noted = (name for name in record["checkpoints"] if name != checkpoint.name)
        others = (name for name in noted if (folder.checkpoints / name).exists())
        write_whole(folder.launch, launch_record(record["launchers"], *others, checkpoint.name))


def chosen_by_first(
    place: Launched | None,
    choose: Callable[[list[str]], Chosen],
    argv: Sequence[str] = (),
    settings: Mapping[str, object] = MappingProxyType({}),
) -> tuple[Chosen, list[str]]:
    """What the first rank has chosen, for all ranks, and the names of all launchers.

    It needs no process group, because Lightning makes that only when it trains. `settings` must be those of all ranks.
    """
    own = launcher_of(place, argv)
    if place is None or place.world_size == 1:
        launchers = [] if own is None else [own]
        return choose(launchers), launchers
    name, store = f"gan.fit {next(_calls)}", cluster.store(place)
    world = StoreWorld(place.world_size, place.rank, name=name, limit=LIMIT, store=store)
    try:
        names, hosts, typed = zip(*world.gather((own, socket.gethostname(), dict(settings))), strict=True)
        launchers = list(dict.fromkeys(name for name in names if name))
        if place.launcher.queued and len(launchers) > 1:
            raise Refused(
                f"rank {names.index(launchers[1])} was started by another command than rank 0: two trainings of one "
                f"job have met at MASTER_PORT={os.environ['MASTER_PORT']}; set another one for one of them"
            )
        for rank, each in enumerate(typed):
            if other := next((name for name, value in each.items() if typed[0].get(name, value) != value), None):
                raise Refused(
                    f"rank {rank}, on {hosts[rank]}, was started with {other} {each[other]}, and rank 0, on "
                    f"{hosts[0]}, with {typed[0][other]}; type the same command on all hosts"
                )
        try:
            answer = choose(launchers) if place.rank == 0 else None
        except UserError as error:
            world.gather(str(error))
            raise
        chosen, *_ = world.gather(answer)
    except dist.DistError as error:
        raise Refused("the first rank has ended before it has chosen a run; see what it has said") from error
    if isinstance(chosen, str):
        raise Refused(chosen)
    return chosen, launchers


def _read(folder: RunFolder) -> dict[str, list[str]] | None:
    try:
        record = json.loads(read_text(folder.launch, 1_000_000))
        return {"launchers": list(record["launchers"]), "checkpoints": list(record["checkpoints"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


# Our own agent counts failures itself. torchrun starts its ranks again after every kind of failure, and tells them only
# the number of the attempt. So the ranks note their steps in torchrun's folder, and the first rank of the next attempt
# reads there how far the last one has come.


def torchrun_folder(place: Launched | None) -> Path | None:
    """The folder that a person's torchrun has made for itself. It is the same for all attempts on this host."""
    if place is None or not place.launcher.elastic or FILE not in os.environ or agent.speaks():
        return None
    return Path(os.environ[FILE]).parents[2]


def note_steps(place: Launched | None) -> None:
    """Let this rank note its steps where the next attempt finds them. Call it before training."""
    if (there := torchrun_folder(place)) is not None:
        os.environ[VARIABLE] = str(there / "board")


def check_attempts(place: Launched | None) -> None:
    """For the first rank: refuse to begin again if the last three attempts have failed at the same step."""
    there = torchrun_folder(place)
    if place is None or there is None:
        return
    noted, failed = there / "failures.json", {}
    if noted.exists():
        failed = json.loads(noted.read_text("utf-8"))
        # When a host comes or goes, the ranks start again too, and the number of the attempt stays.
        failed.setdefault(str(place.restarts), Board(there / "board", place.local_size).furthest())
    last = [step for attempt, step in failed.items() if attempt != "0"][-agent.SAME_STEP :]
    if len(last) == agent.SAME_STEP and len(set(last)) == 1:
        where = f"at step {last[0]}" if last[0] != NEVER else "before the first step"
        raise UserError(
            f"the last {agent.SAME_STEP} attempts have failed {where}, so the ranks are not started again; see above "
            f"what each of them said"
        )
    noted.write_text(json.dumps(failed), encoding="utf-8")
    Board.new(there / "board", place.local_size)
