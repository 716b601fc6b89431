"""World: a rank's place among all ranks."""

from dataclasses import dataclass, field

import torch

from strategies.policies.groups import Groups


@dataclass(frozen=True)
class World:
    """This rank's place among all ranks: their number `size`, its own `rank` and `device`, and the ranks per node.

    `groups` gives players the process groups for their collectives.
    """

    size: int
    rank: int
    device: torch.device
    local: int = 1
    groups: Groups = field(default_factory=Groups)
