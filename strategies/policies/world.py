"""World: a rank's place among those that train, or among those that serve with it."""

from dataclasses import dataclass, field

import torch

from strategies.policies.groups import Groups


@dataclass(frozen=True)
class World:
    """The number `size` of these ranks, this one's own `rank` and `device`, and how many of the run's are on its node.

    `groups` gives players the process groups for their collectives.
    """

    size: int
    rank: int
    device: torch.device
    per_node: int = 1
    groups: Groups = field(default_factory=Groups)
