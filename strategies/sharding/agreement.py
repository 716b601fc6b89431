"""Whether all ranks gather the same weights next, before they wait for each other in vain."""

from typing import Any

import torch
import torch.distributed as dist

from gan.errors import UserError


def agree_on_gather(number: int, group: Any, device: torch.device, phase: str, policy: str) -> None:
    """Raise on all ranks of the group if another one gathers another bucket than this number.

    It is asked the first time that a phase is played: one small collective for each gather.
    """
    both = torch.tensor([number, -number], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    if both[0] != -both[1]:
        raise UserError(other_order(phase, policy))


def other_order(phase: str, *policies: str) -> str:
    """What is said of ranks that read different weights under these policies."""
    choices = " or ".join(f"{policy}+whole" for policy in dict.fromkeys(policies))
    return (
        f"phase '{phase}' read weights in another order on another rank; where layers are chosen by sample, type "
        f"{choices}, which gathers a player once a phase"
    )
