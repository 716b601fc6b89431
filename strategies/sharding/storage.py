"""How a rank stores a player's weights, whole or in shards, and which part of them it owns."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, autograd, nn
from torch.optim import Optimizer

from gan.files.tensors import Share
from strategies import private
from strategies.sharding import bucket as layout
from strategies.sharding.bucket import Bucket, Sharing
from strategies.world import of_all

SCALARS = {"step", "mu_product"}  # optimizer states that are one number for a whole weight


class Storage:
    """The weights are whole on every rank, and every rank owns all of them. Sharded storages override what differs.

    `weights` are the author's parameters that learn. `owned` is what this rank's optimizer and average work on.
    """

    owns_part = False  # whether the optimizer works on a part of the weights: on some, or on pieces of all
    owns_pieces = False  # whether it works on pieces of weights
    group: Any = None  # the ranks that together own the weights once, if each owns a part
    gradients_apart = False  # whether a weight's owner has its whole gradient, and no other rank has any of it

    def __init__(self, weights: Mapping[str, nn.Parameter]) -> None:
        self.weights = dict(weights)
        self.owned: dict[str, nn.Parameter] = self.weights
        self.buckets: list[Bucket] = []

    @property
    def unsharded(self) -> bool:
        return True

    def unshard(self, exact: bool = False) -> None:
        """Make all weights whole and up to date. `exact`: in their own dtype, not in the one that phases compute in.

        A phase asks without `exact`; validations, code of an author between phases, and the end of a training with it.
        Who asks calls `reshard` later, but not if the weights were `unsharded` before.
        """

    def reshard(self) -> None:
        """Free what a rank does not hold between phases."""

    def shards_changed(self, others: bool = False) -> None:
        """Mark the whole weights as out of date, because the shards were written to. Communicates nothing.

        `others`: the shards of parameters that do not learn were written to as well.
        """

    def keep_writes(self) -> None:
        """Copy into the shards what code has written into the whole weights. Communicates nothing."""

    def step(self, optimizer: Optimizer, stepped: Sequence[nn.Parameter]) -> None:
        """Step what this rank owns, and update the weights from it. `stepped` are the weights that have a gradient."""
        optimizer.step()

    def tensors(self) -> list[Tensor]:
        """The tensors that hold the weights between phases, and this rank's shards of those that do not learn too."""
        return [*(list(self.weights.values()) if self.unsharded else []), *(bucket.shard for bucket in self.buckets)]

    def shares(self) -> dict[Tensor, Share | None]:
        """This rank's share of each sharded parameter, to be saved or filled; None where it owns nothing of one.

        All ranks call it. What loads fills the shares' memory, and calls `shards_changed` and `reshard` after that.
        """
        return {}

    def share_of(self, name: str, tensor: Tensor) -> Share:
        """A share of the tensor's memory, to be saved or filled. The tensor has a number for each owned element."""
        return Share.whole(tensor)

    def per_element(self, key: str) -> bool:
        """Whether this state of the optimizer has a number for each element of a weight, and so is sharded like it.

        The shape cannot decide this: a weight may be a scalar, and then its moments are scalars too.
        """
        return self.owns_pieces and key not in SCALARS

    def values_of_all(self, values: dict[str, Any]) -> dict[str, Any]:
        """Plain values that each rank has for the weights it owns, by the weights' names: those of all ranks."""
        return values

    def release(self) -> None:
        """Give the author's parameters their own memory. Communicates nothing, because a rank may be lost."""


class Buckets(Storage):
    """The weights are in buckets, of which this rank owns an equal shard. See [Note: shards of elements].

    With `sharing.keep` the weights stay whole on every rank, and only what the optimizer works on is sharded. Without
    it, weights are whole only between `unshard` and `reshard`, and the buckets of `others` (parameters that do not
    learn) are sharded too.
    """

    owns_part = owns_pieces = True

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        sharing: Sharing,
        learning: Sequence[Bucket],
        others: Sequence[Bucket] = (),
    ) -> None:
        """`learning` are the buckets of the weights."""
        super().__init__(weights)
        self.sharing = sharing
        self.learning = learning
        self.buckets = [*learning, *others]
        pieces = {name: piece for bucket in self.learning for name, piece in bucket.pieces.items()}
        self.owned = {name: pieces[name] for name in weights if name in pieces}
        self.stale = False  # whether kept weights are older than the shards

    @property
    def group(self) -> Any:
        return self.sharing.group

    @property
    def unsharded(self) -> bool:
        return not self.stale and all(bucket.unsharded for bucket in self.buckets)

    def unshard(self, exact: bool = False) -> None:
        self.keep_writes()
        for bucket in self.buckets:
            dtype = bucket.dtype if exact else bucket.compute_dtype
            if bucket.released:
                continue
            if self.stale or not bucket.unsharded or bucket.whole is None or bucket.whole.dtype != dtype:
                bucket.unshard(dtype)
        self.stale = False

    def reshard(self) -> None:
        if self.sharing.keep:
            self.unshard()
            return
        for bucket in self.buckets:
            bucket.reshard()

    def shards_changed(self, others: bool = False) -> None:
        if self.sharing.keep:
            self.stale = True
            return
        for bucket in self.buckets if others else self.learning:
            bucket.shard_changed()

    def keep_writes(self) -> None:
        if not self.stale:
            for bucket in self.buckets:
                bucket.keep_writes()

    def step(self, optimizer: Optimizer, stepped: Sequence[nn.Parameter]) -> None:
        self.keep_writes()
        optimizer.step()
        self.shards_changed()
        if self.sharing.keep:
            self.unshard()
            # An earlier graph must not run backward with the new weights. Plain torch finds this out by the version.
            autograd.graph.increment_version(stepped)
            for bucket in self.buckets:
                bucket.up_to_date()

    def shares(self) -> dict[Tensor, Share | None]:
        self.keep_writes()
        return {weight: bucket.share_of(name) for bucket in self.buckets for name, weight in bucket.weights.items()}

    def share_of(self, name: str, tensor: Tensor) -> Share:
        bucket = next(bucket for bucket in self.learning if name in bucket.weights)
        share = bucket.share_of(name)
        assert share is not None, f"this rank owns nothing of '{name}'"
        return replace(share, tensor=tensor)

    def release(self) -> None:
        self.sharing = replace(self.sharing, group=None, copies=None)  # a reference would keep the group's threads
        for bucket in self.buckets:
            bucket.release()
            bucket.sharing = self.sharing


class OneOwner(Storage):
    """Each parameter has one owner in the group, which steps and averages it whole, and broadcasts it.

    `parts` are the parameters of each rank, in the same order on all ranks: also those that do not learn, if the
    storage has them.
    """

    owns_part = True

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
    def _send(self, parameters: Iterable[nn.Parameter], stepped: bool = True) -> None:
        """Broadcast these from their owners, in buckets of one dtype, which also tells autograd on every rank.

        Without `stepped` it does not tell the owner's, whose weights stay as they are.
        """
        chosen = set(parameters)
        for rank, part in enumerate(self.parts):
            same = part is self.own and not stepped
            sent = [each.data if same else each.detach() for each in part.values() if each in chosen]
            # torch refuses to copy a weight onto itself if its rows of one element lie in other steps.
            sent = [each.view(-1) if each.is_contiguous() else each for each in sent]
            if sent:
                private.broadcast_coalesced(self.group, sent, layout.SIZE, rank)
        self.stale = False

    def values_of_all(self, values: dict[str, Any]) -> dict[str, Any]:
        everyone = of_all(values, self.group)  # after a release: all ranks
        return {name: value for each in everyone for name, value in each.items()}

    def release(self) -> None:
        self.group = None  # a reference would keep the group's threads


class DealtWeights(OneOwner):
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
