"""Each rank owns some of a player's weights whole."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from strategies import private
from strategies.sharding import bucket
from strategies.sharding.bucket import Sharing
from strategies.sharding.storage import Storage
from strategies.world import of_all


class OneOwner(Storage):
    """Each parameter has one owner in the group, which steps and averages it whole, and broadcasts it.

    `parts` are the parameters of each rank, in the same order on all ranks: also those that do not learn, if the
    storage has them.
    """

    sharded = True

    def __init__(
        self, weights: Mapping[str, nn.Parameter], parts: Sequence[Mapping[str, nn.Parameter]], group: dist.ProcessGroup
    ) -> None:
        super().__init__(weights)
        self.group, self.parts, self.own = group, parts, parts[dist.get_rank(group)]
        self.owned = {name: weight for name, weight in weights.items() if name in self.own}
        self.stale = False  # whether parameters of other ranks are older than their owners'

    @property
    def unsharded(self) -> bool:
        return not self.stale

    def shards_changed(self, others: bool = False) -> None:
        self.stale = True

    @torch.no_grad()
    def _send(self, parameters: Iterable[nn.Parameter]) -> None:
        """Broadcast these from their owners, in buckets of one dtype, which also tells autograd on every rank."""
        chosen = set(parameters)
        for rank, part in enumerate(self.parts):
            sent = [each.detach() for each in part.values() if each in chosen]
            # torch refuses to copy a weight onto itself if its rows of one element lie in other steps.
            sent = [each.view(-1) if each.is_contiguous() else each for each in sent]
            if sent:
                private.broadcast_coalesced(self.group, sent, bucket.SIZE, rank)
        self.stale = False

    def values_of_all(self, values: dict[str, Any]) -> dict[str, Any]:
        everyone = of_all(values, self.group)  # after a release: all ranks
        return {name: value for each in everyone for name, value in each.items()}

    def release(self) -> None:
        self.group = None  # a reference would keep the group's threads


class WholeWeights(OneOwner):
    """All weights are whole on every rank, for optimizers that look at whole weights.

    After a step every owner broadcasts its weights. The author's parameters are used as they are: nothing is laid out
    in other memory. So a weight that code writes needs no care here.

    torch's ZeroRedundancyOptimizer deals out whole weights too. It is not used, because it makes the optimizer itself,
    from the weights of one rank, and to save its state gathers all of it on one rank.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], sharing: Sharing) -> None:
        dealt = deal({name: weight.numel() for name, weight in weights.items()}, sharing.size)
        parts = [{name: weight for name, weight in weights.items() if name in names} for names in dealt]
        super().__init__(weights, parts, sharing.group)

    def unshard(self, exact: bool = False) -> None:
        if self.stale:
            self._send(self.weights.values())

    def reshard(self) -> None:
        self.unshard()

    def step(self, optimizer: Optimizer, stepped: Sequence[nn.Parameter]) -> None:
        optimizer.step()
        self._send(stepped)


def deal(sizes: Mapping[str, int], ranks: int) -> list[set[str]]:
    """The names that each rank gets. Large weights come first, and each goes to the rank that has least so far."""
    dealt: list[set[str]] = [set() for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        rank = loads.index(min(loads))
        dealt[rank].add(name)
        loads[rank] += sizes[name]
    return dealt
