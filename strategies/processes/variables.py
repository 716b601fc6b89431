"""Numbers in environment variables, by which launchers tell a process its place."""

import re
from collections.abc import Mapping

from gan.errors import UserError

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
