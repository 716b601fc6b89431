"""What ranks communicate by: the backend of torch.distributed that a person has named."""

import torch
import torch.distributed as dist

from gan.errors import UserError

KNOWN = ("gloo", "nccl", "mpi")
ADVICE = "type gloo (process_group_backend, in gan.fit --backend), or leave it out"


def check_backend(name: str) -> None:
    """Refuse a backend that this torch does not have. `cpu:gloo,cuda:nccl` names one for each kind of device."""
    for part in name.split(","):
        single = part.rpartition(":")[2].strip().lower()
        if not dist.is_backend_available(single):
            found = ", ".join(each for each in KNOWN if dist.is_backend_available(each))
            why = "; only a torch that is built on a machine with MPI has it" if single == "mpi" else ""
            raise UserError(f"torch {torch.__version__} has no backend '{single}' here, but {found}{why}; {ADVICE}")


def check_device(name: str, device: torch.device) -> None:
    """Refuse a backend that cannot move the memory of this device."""
    if name.strip().lower() == "nccl" and device.type != "cuda":
        raise UserError(f"backend nccl communicates between GPUs only, and ranks compute on {device.type}; {ADVICE}")


def with_store(name: str) -> str:
    """The backend as torch is given it. For plain `mpi` torch makes no store, by which our ranks end together."""
    return "cpu:mpi,cuda:mpi" if name.strip().lower() == "mpi" else name
