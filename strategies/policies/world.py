"""World: a rank's place among those that train, or among those that serve with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from gan.phase import Phase


class Groups:
    """Gives each player a process group; players share one where their collectives never run at the same time.

    Two players that learn in one phase need two groups: backward makes their gradients in an order that may differ
    between ranks, and in one group collectives must have the same order on all ranks. It is never torch's default
    group, in which losses and synchronised batch norms have collectives of their own. Sharing keeps the number small,
    because each group costs threads (gloo) or the device's memory (NCCL).

    All ranks must ask for the groups of the same players, in the same order.
    """

    def __init__(self, phases: Sequence[Phase] = (), timeout: timedelta | None = None) -> None:
        """`timeout` is how long a collective waits for the other ranks; None is torch's own limit."""
        self.phases, self.timeout = phases, timeout
        self._made: list[dist.ProcessGroup] = []
        self._shared: list[tuple[dist.ProcessGroup, set[str]]] = []  # with the players that have it

    def own(self) -> dist.ProcessGroup:
        """A group for one player alone, whose collectives may run at any time."""
        self._made.append(dist.new_group(timeout=self.timeout))
        return self._made[-1]

    def shared(self, player: str) -> dist.ProcessGroup:
        """A group for a player whose collectives run only in phases in which it learns, and between phases."""
        others = {name for phase in self.phases if player in phase.learners for name in phase.learners} - {player}
        for group, players in self._shared:
            if not players & others:
                players.add(player)
                return group
        self._shared.append((self.own(), {player}))
        return self._shared[-1][0]

    def release(self) -> None:
        """End them, with their threads. Nobody may refer to one any more."""
        self._shared = []
        while self._made:
            dist.destroy_process_group(self._made.pop())


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
