"""What zero1, zero2, zero3 and fsdp have in common: each rank owns a part of a player's elements."""

from collections.abc import Iterator, Mapping
from functools import cached_property

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gan.files.errors import UserError
from strategies.policies.amounts import size_of
from strategies.policies.policy import Policy
from strategies.sharding import bucket
from strategies.sharding.bucket import Bucket, Sharing
from strategies.sharding.storage import Buckets, Storage


class Sharded(Policy):
    """Optimizer and average work on this rank's pieces of the weights. See [Note: shards of elements].

    Options: `offload` keeps all that this rank owns in the CPU's memory, and steps it there. `hybrid` shards within a
    node, or among N neighbours, and each of these groups has a copy. Weights are gathered within the group; gradients
    are averaged over all ranks.

    The zero policies are written by hand, because torch's ZeroRedundancyOptimizer gives each rank whole weights, so
    that some ranks hold more than others.
    """

    max_ranks = None
    communicates_only_in_its_turn = True
    takes = Policy.takes | {"offload", "hybrid"}

    # ---- what it costs ----

    @property
    def shards(self) -> int:
        """How many ranks own the player together: all, or (hybrid) the ranks of a node, or N."""
        ranks = self.world.size
        size = (self.options["hybrid"] or self.world.per_node) if "hybrid" in self.options else ranks
        if ranks % size:
            raise UserError(
                f"player '{self.player.name}': {ranks} ranks cannot be parted into groups of {size}, as "
                f"'{self.name}+hybrid:{size}' asks; type {self.name}+hybrid:N with an N that divides {ranks}"
            )
        if size == 1 < ranks:
            raise UserError(
                f"player '{self.player.name}': '{self.name}+hybrid' with one rank in each group, as where each host "
                f"has one, gives every rank a whole copy; leave +hybrid out to shard over all ranks, or type ddp"
            )
        return size

    def parts(self, weights: Mapping[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
        return bucket.parts(weights)

    @property
    def whole_bytes(self) -> float:
        if self.keep and self.divided and self.half is not None:
            return super().whole_bytes - sum(
                w.numel() * (w.element_size() - self.half.itemsize) for w in self.weights.values()
            )
        return super().whole_bytes

    @property
    def shard_bytes(self) -> float:
        """A few elements more are there, so that all ranks own equally many."""
        if self.begins_sharded:
            return size_of(self.belongings.parameters.values()) / self.shards
        return self.owned_bytes if self.offloaded or (self.divided and self.half is not None) else 0.0

    @property
    def owned_bytes(self) -> float:
        return size_of(self.weights.values()) / (self.shards if self.divided else 1)

    # ---- its storage ----

    @property
    def half(self) -> torch.dtype | None:
        """The dtype in which weights are gathered, if it is not their own."""
        return torch.bfloat16 if "bf16" in self.options else None

    def make_storage(self) -> Storage:
        return Buckets(self.weights, self.sharing, self.buckets(self.weights))

    def buckets(self, weights: Mapping[str, nn.Parameter]) -> list[Bucket]:
        return [self.bucket(part) for part in self.parts(weights)]

    def bucket(self, part: Mapping[str, nn.Parameter]) -> Bucket:
        return Bucket(part, self.sharing)

    def weights_and_others(self) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """The parameters that learn, and the others. A player that follows another one is laid out like it."""
        like, own = self if self.followed is None else self.followed, self.belongings.parameters
        there = {name: own[name] for name in like.belongings.parameters if name in own}
        others = {name: parameter for name, parameter in there.items() if name not in like.weights}
        return {name: there[name] for name in like.weights}, others

    @cached_property
    def sharing(self) -> Sharing:
        """Share among all ranks, or (hybrid) among neighbours: the ranks of a node if no number is given."""
        size, rank, group, copies = self.world.size, self.world.rank, self.group, None
        if self.mesh is not None:
            size, rank = self.mesh["shards"].size(), self.mesh.get_local_rank("shards")
            group, copies = self.mesh.get_group("shards"), self.mesh.get_group("copies")
        cpu = torch.device("cpu") if self.world.device.type != "meta" else self.world.device  # a plan has no values
        home = cpu if "offload" in self.options else None
        return Sharing(size, rank, group, copies, self.keep, home, self.half)

    @cached_property
    def mesh(self) -> DeviceMesh | None:
        """A row of ranks shares one copy; a column of ranks owns the same shard. None if all ranks share one copy."""
        size, ranks = self.shards, self.world.size
        if size == ranks:
            return None
        return self.world.groups.mesh(self.world.device.type, (ranks // size, size), ("copies", "shards"))
