"""How this process was started: alone, or as one rank of several, by torchrun, srun, mpirun or a person.

A launcher tells a process its place in environment variables. Each launcher has its own.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from gan.files.errors import UserError
from strategies.processes import slurm

PORTS = 65_535
RANKS = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_RESTART_COUNT", "JSM_NAMESPACE_RANK"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
SIZES = (
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"),
    *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)


def number(variables: Mapping[str, str], name: str) -> int:
    """The number in a variable. The error names the variable, its value, and what is wrong."""
    text = variables.get(name)
    if text is None:
        raise UserError(f"the environment variable {name} is not set, though others of its launcher are")
    if not re.fullmatch(r"\d{1,15}", text, re.ASCII):
        raise UserError(f"the environment variable {name} is '{text}', which is no number from 0 on")
    if name in SIZES and int(text) == 0:
        raise UserError(f"the environment variable {name} is '{text}', and must be 1 or more")
    if name == "MASTER_PORT" and not 1 <= int(text) <= PORTS:
        raise UserError(f"the environment variable {name} is '{text}', and ports have numbers from 1 to {PORTS}")
    return int(text)


def check(variables: Mapping[str, str]) -> None:
    """Refuse what is no number. Lightning reads these variables too, whoever has started this process."""
    for name in (*RANKS, *SIZES, "MASTER_PORT"):
        if name in variables:
            number(variables, name)


STARTED_BY = {
    "torchrun": "torchrun started {} here",
    "slurm": "srun started {} here",
    "mpi": "mpirun started {} here",
    "environment": "RANK and WORLD_SIZE announce {} here",
}
ADVICE = {
    "torchrun": "type torchrun --nproc-per-node {}",
    "slurm": "type srun --ntasks-per-node {}",
    "mpi": "type mpirun --map-by ppr:{}:node",
    "environment": "start {} on each host, or unset RANK",
}
NAMES = {
    "torchrun": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    "slurm": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID"),
    "mpi": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")),
    "environment": ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
}
RESTARTS = {"torchrun": "TORCHELASTIC_RESTART_COUNT", "slurm": "SLURM_RESTART_COUNT"}


@dataclass(frozen=True)
class Launched:
    """The place of this process among the ranks that somebody else started.

    `by` is "torchrun", "slurm", "mpi" or "environment". torchrun stands for all that use torch's elastic agent, also
    `torch.distributed.launch` and `accelerate launch`. "environment" means that a person set RANK and WORLD_SIZE.
    """

    by: str
    rank: int
    local_rank: int
    world_size: int
    local_size: int
    node_rank: int

    @property
    def nodes(self) -> int:
        return self.world_size // self.local_size

    @property
    def restarts(self) -> int:
        """How often the launcher has started its ranks again."""
        name = RESTARTS.get(self.by, "")
        return number(os.environ, name) if name in os.environ else 0

    def __str__(self) -> str:
        return STARTED_BY[self.by].format(f"{self.local_size} rank{'s' if self.local_size > 1 else ''}")

    def advice(self, ranks: int | str) -> str:
        """What to type to get so many ranks on each host."""
        return ADVICE[self.by].format(ranks)

    def check(self) -> None:
        """Refuse numbers that there are not, and ranks not numbered host by host, with as many on each host."""
        rank, local_rank, size, local_size, *_ = NAMES[self.by]
        _check_below(rank, self.rank, size, self.world_size)
        _check_below(local_rank, self.local_rank, local_size, self.local_size)
        if self.rank != self.node_rank * self.local_size + self.local_rank or self.world_size % self.local_size:
            raise UserError(
                f"rank {self.rank} of {self.world_size} has number {self.local_rank} of {self.local_size} on its host, "
                f"number {self.node_rank}; ranks must be numbered host by host, with as many on each: "
                f"{self.advice('N')}"
            )


def launched(variables: Mapping[str, str] | None = None) -> Launched | None:
    """The place that a launcher gave this process. None if nobody else starts ranks, so that we may start them.

    The launcher that is nearest to the program counts: torchrun and mpirun may run inside a Slurm job.
    """
    variables = os.environ if variables is None else variables
    check(variables)
    for look in (_torchrun, _mpi, _by_hand, _slurm):
        if (found := look(variables)) is not None:
            found.check()
            return found
    return None


def _torchrun(variables: Mapping[str, str]) -> Launched | None:
    if "TORCHELASTIC_RUN_ID" not in variables:
        return None
    return Launched("torchrun", *(number(variables, name) for name in NAMES["torchrun"]))


def _mpi(variables: Mapping[str, str]) -> Launched | None:
    """Open MPI's mpirun. It does not number the hosts."""
    if "OMPI_COMM_WORLD_RANK" not in variables:
        return None
    rank, local_rank, size, local_size = (number(variables, name) for name in NAMES["mpi"])
    return Launched("mpi", rank, local_rank, size, local_size, node_rank=rank // local_size)


def _by_hand(variables: Mapping[str, str]) -> Launched | None:
    """What a person, or a cluster's own starter, has set. Lightning's launcher sets no RANK."""
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    rank, size = number(variables, "RANK"), number(variables, "WORLD_SIZE")
    _check_below("RANK", rank, "WORLD_SIZE", size)
    if "LOCAL_RANK" not in variables and size == 1:
        return None
    on_one_host = _is_this_host(variables.get("MASTER_ADDR", ""))
    missing = [name for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE") if name not in variables]
    if "LOCAL_RANK" in missing or (missing and not on_one_host):
        raise UserError(
            f"RANK={rank} and WORLD_SIZE={size} say that this is one of {size} ranks; also set {' and '.join(missing)} "
            f"(LOCAL_RANK is its number on its host, LOCAL_WORLD_SIZE how many are there), or unset RANK to let this "
            f"process start the ranks"
        )
    local_rank = number(variables, "LOCAL_RANK")
    local_size = number(variables, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in variables else size
    return Launched("environment", rank, local_rank, size, local_size, node_rank=rank // local_size)


def _slurm(variables: Mapping[str, str]) -> Launched | None:
    if not slurm.started_by_srun(variables):
        return None
    names = NAMES["slurm"]
    rank, local_rank, size, node = (number(variables, names[each]) for each in (0, 1, 2, 4))
    try:
        tasks = slurm.tasks_here(variables)
    except LookupError:
        tasks = 0
    if not tasks:
        said = variables.get(names[3], "")
        raise UserError(
            f"the environment variable {names[3]} is '{said}', which says no tasks of node {node} ({names[4]})"
        )
    return Launched("slurm", rank, local_rank, size, tasks, node)


def _check_below(name: str, value: int, of: str, count: int) -> None:
    if value >= count:
        raise UserError(
            f"the environment variable {name} is '{value}', and {of} is '{count}': the last rank has number "
            f"{count - 1}; set both as your launcher does, or unset them to let this process start the ranks"
        )


def _is_this_host(address: str) -> bool:
    """Whether ranks that meet at this address are all on this host."""
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
