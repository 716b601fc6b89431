"""How this process was started: alone, or as one rank of several, by torchrun, srun, mpirun or a person.

A launcher tells a process its place in environment variables. Each launcher has its own.
"""

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address

from gan.files.errors import UserError
from strategies.processes import slurm

PORTS = 65_535
COUNTS = re.compile("SIZE|NTASKS|CPUS")  # in the name of a variable that says how many there are
OTHERS = ("NODE_RANK", "JSM_NAMESPACE_RANK", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE", "MASTER_PORT")


def number(variables: Mapping[str, str], name: str) -> int:
    """The number in a variable. The error names the variable, its value, and what is wrong."""
    text = variables.get(name)
    if text is None:
        raise UserError(f"the environment variable {name} is not set, though others of its launcher are")
    if not re.fullmatch(r"\d{1,15}", text, re.ASCII):
        raise UserError(f"the environment variable {name} is '{text}', which is no number from 0 on")
    if COUNTS.search(name) and int(text) == 0:
        raise UserError(f"the environment variable {name} is '{text}', and must be 1 or more")
    if name == "MASTER_PORT" and not 1 <= int(text) <= PORTS:
        raise UserError(f"the environment variable {name} is '{text}', and ports have numbers from 1 to {PORTS}")
    return int(text)


def check(variables: Mapping[str, str]) -> None:
    """Refuse what is no number. Lightning reads these variables too, whoever has started this process."""
    for name in (*(name for each in LAUNCHERS.values() for name in (*each.names, each.restarts)), *OTHERS):
        if name in variables and name != TASKS:
            number(variables, name)


@dataclass(frozen=True)
class Launched:
    """The place of this process among the ranks that somebody else started: `by` is one of LAUNCHERS."""

    by: str
    rank: int
    local_rank: int
    world_size: int
    local_size: int
    node_rank: int
    # As the launcher has meant them.
    variables: Mapping[str, str] = field(default_factory=lambda: os.environ, compare=False, repr=False)

    @property
    def nodes(self) -> int:
        return self.world_size // self.local_size

    @property
    def launcher(self) -> "Launcher":
        return LAUNCHERS[self.by]

    @property
    def restarts(self) -> int:
        """How often the launcher has started its ranks again."""
        name = self.launcher.restarts
        return number(os.environ, name) if name in os.environ else 0

    def __str__(self) -> str:
        return self.launcher.started.format(f"{self.local_size} rank{'s' if self.local_size > 1 else ''}")

    def advice(self, ranks: int | str) -> str:
        """What to type to get so many ranks on each host."""
        return self.launcher.advice.format(ranks)

    def check(self) -> None:
        """Refuse numbers that there are not, and ranks not numbered host by host, with as many on each host."""
        rank, local_rank, size, local_size, *_ = self.launcher.names
        _check_below(rank, self.rank, size, self.world_size)
        _check_below(local_rank, self.local_rank, local_size, self.local_size)
        if self.rank != self.node_rank * self.local_size + self.local_rank or self.world_size % self.local_size:
            raise UserError(
                f"rank {self.rank} of {self.world_size} has number {self.local_rank} of {self.local_size} on its host, "
                f"number {self.node_rank}; ranks must be numbered host by host, with as many on each: "
                f"{self.advice('N')}"
            )


def launched(variables: Mapping[str, str] | None = None) -> Launched | None:
    """The place that a launcher gave this process. None if nobody else starts ranks, so that we may start them."""
    variables = os.environ if variables is None else variables
    check(variables)
    for by, launcher in LAUNCHERS.items():
        if (meant := launcher.meant(variables)) is not None:
            rank, local_rank, size, local_size, *node = (number(meant, name) for name in launcher.names)
            found = Launched(by, rank, local_rank, size, local_size, node[0] if node else rank // local_size, meant)
            found.check()
            return found
    return None


def _by_hand(variables: Mapping[str, str]) -> Mapping[str, str] | None:
    """What a person, or a cluster's own starter, has set. Lightning's launcher sets no RANK."""
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    rank, size = number(variables, "RANK"), number(variables, "WORLD_SIZE")
    if "LOCAL_RANK" not in variables and size == 1:
        return None
    missing = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name not in variables]
    if "LOCAL_RANK" in missing or (missing and not _is_this_host(variables.get("MASTER_ADDR", ""))):
        raise UserError(
            f"RANK={rank} and WORLD_SIZE={size} say that this is one of {size} ranks; also set {' and '.join(missing)} "
            f"(LOCAL_RANK is its number on its host, LOCAL_WORLD_SIZE how many are there), or unset RANK to let this "
            f"process start the ranks"
        )
    return {"LOCAL_WORLD_SIZE": str(size), **variables}


def _slurm(variables: Mapping[str, str]) -> Mapping[str, str] | None:
    if not slurm.started_by_srun(variables):
        return None
    node = number(variables, "SLURM_NODEID")
    try:
        tasks = slurm.tasks_here(variables)
    except LookupError:
        tasks = 0
    if not tasks:
        raise UserError(
            f"the environment variable {TASKS} is '{variables.get(TASKS, '')}', which says no tasks of node {node} "
            f"(SLURM_NODEID)"
        )
    step = f"{variables.get('SLURM_JOB_ID')}.{variables['SLURM_STEP_ID']}"
    # Lightning takes one port for all steps of a job, and refuses srun without --ntasks-per-node.
    own = {"MASTER_PORT": str(port_of(step)), "SLURM_NTASKS_PER_NODE": str(tasks)}
    return {**own, **variables, TASKS: str(tasks)}


def port_of(launch: str) -> int:
    """A port that all ranks of a launch compute, and other launches do not."""
    return 10_000 + zlib.crc32(launch.encode()) % 20_000


def _check_below(name: str, value: int, of: str, count: int) -> None:
    if value >= count:
        raise UserError(
            f"the environment variable {name} is '{value}', and {of} is '{count}': the last rank has number "
            f"{count - 1}; set both as your launcher does, or unset them to let this process start the ranks"
        )


def _is_this_host(address: str) -> bool:
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


@dataclass(frozen=True)
class Launcher:
    """One that starts ranks, and tells each its place in variables. A row has all that differs between launchers.

    `meant` gives these variables as the launcher has meant them, or None if it has not started this process; also what
    it does not say itself, such as TASKS, and MASTER_ADDR and MASTER_PORT, if it says otherwise where rank 0 is. How
    many ranks a host has can be found out as `_by_hand` does.
    `names` are the names of: the rank; its number on its host; how many ranks there are, and how many on this host;
    then the host's number, if the launcher numbers hosts.
    """

    meant: Callable[[Mapping[str, str]], Mapping[str, str] | None]
    names: tuple[str, ...]
    started: str
    advice: str
    see: str = ""  # more advice: what lets each rank see all GPUs
    restarts: str = ""  # the variable with how often it has started its ranks again
    lightning: str = ""  # Lightning's class that finds rank 0's host; without it MASTER_ADDR and MASTER_PORT name that
    job: str = ""  # the variable that names a launch, which on one host then needs no MASTER_ADDR and MASTER_PORT
    set_both: str = "set both"  # what a person types who has to set MASTER_ADDR and MASTER_PORT
    queued: str = ""  # the name of a job that goes back into a queue and keeps its name, made of variables
    elastic: bool = False  # torch's agent: its ranks outlive it, and find what its earlier attempts have stored


def _if_set(name: str) -> Callable[[Mapping[str, str]], Mapping[str, str] | None]:
    return lambda variables: variables if name in variables else None


TASKS = "SLURM_STEP_TASKS_PER_NODE"
# The nearest to the program comes first: torchrun and mpirun may run inside a Slurm job. A cluster's own is the last.
LAUNCHERS = {
    "torchrun": Launcher(  # and all that use torch's elastic agent: torch.distributed.launch, accelerate launch
        _if_set("TORCHELASTIC_RUN_ID"),
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
        "torchrun started {} here",
        "type torchrun --nproc-per-node {}",
        restarts="TORCHELASTIC_RESTART_COUNT",
        lightning="TorchElasticEnvironment",
        elastic=True,
    ),
    "mpi": Launcher(  # Open MPI's mpirun
        _if_set("OMPI_COMM_WORLD_RANK"),
        tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")),
        "mpirun started {} here",
        "type mpirun --map-by ppr:{}:node",
        job="PMIX_NAMESPACE",
        set_both="type mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500",
    ),
    "environment": Launcher(
        _by_hand,
        ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
        "RANK and WORLD_SIZE announce {} here",
        "start {} on each host, or unset RANK",
    ),
    "slurm": Launcher(
        _slurm,
        ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", TASKS, "SLURM_NODEID"),
        "srun started {} here",
        "type srun --ntasks-per-node {}",
        see=", or let each task see all GPUs: srun --gpu-bind=none",
        restarts="SLURM_RESTART_COUNT",
        lightning="SLURMEnvironment",
        queued="slurm {SLURM_JOB_ID}",
    ),
}
