"""The process group of a part of the run, and the bridge to the other parts."""

from typing import Any

import torch
import torch.distributed as dist

from gan.errors import UserError
from strategies.placing.messages import Bridge
from strategies.placing.placement import Part


def refuse_a_group() -> None:
    """Refuse a process group that is there before: torch's default group must be that of the part."""
    if dist.is_initialized():
        raise UserError(
            "players on ranks of their own need process groups of their own, and this process has one already; train "
            "with '@' in a program of its own, and without init_process_group"
        )


def connect(part: Part, store: dist.Store, size: int, device: torch.device, backend: str, **options: Any) -> Bridge:
    """Make the process group of this rank's part, and the bridge to all ranks of the run."""
    own = dist.PrefixStore(part.name, store)
    dist.init_process_group(backend, store=own, rank=part.rank, world_size=part.size, **options)
    return Bridge(store, part.ranks[part.rank], size, device)
