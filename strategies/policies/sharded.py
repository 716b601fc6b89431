"""What zero1, zero2, zero3 and fsdp have in common: each rank owns a part of a player's elements."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gan.files.errors import UserError
from strategies import private
from strategies.amounts import Group, Held, size
from strategies.policies.policy import Policy
from strategies.sharding import bucket
from strategies.sharding.bucket import Bucket, Sharing
from strategies.sharding.storage import Buckets, Storage

WHOLE_BUCKETS = 7  # how many whole buckets zero2 (of gradients) or zero3 (of weights) holds at the same time


class Sharded(Policy):
    """Optimizer and average work on this rank's pieces of the weights. See [Note: shards of elements].

    Options: `offload` keeps all that this rank owns in the CPU's memory, and steps it there. `hybrid` shards within a
    node, or among N neighbours, and each of these groups has a copy. Weights are gathered within the group; gradients
    are averaged over all ranks.

    The zero policies are written by hand, because torch's ZeroRedundancyOptimizer gives each rank whole weights, so
    that some ranks hold more than others.
    """

    max_ranks = None
    takes = Policy.takes | {"offload", "hybrid"}
    keep = True  # whole weights between phases; otherwise all parameters are shared out, also those that do not learn

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
        return size

    @property
    def copies(self) -> Group:
        """The ranks that own the same shard, for a plan."""
        return Group(self.world.size // self.shards, self.shards)

    @property
    def half(self) -> torch.dtype | None:
        """The dtype in which weights are gathered, if it is not their own."""
        return torch.bfloat16 if "bf16" in self.options else None

    def parts(self, weights: Mapping[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
        """The weights of each bucket."""
        return bucket.parts(weights)

    @property
    def divided(self) -> bool:
        """Whether there is something to share out, and somebody to share with."""
        return self.world.size > 1 and bool(self.weights if self.keep else self.belongings.parameters)

    @property
    def begins_sharded(self) -> bool:
        return self.divided and not self.keep

    def holds(self) -> Held:
        """Optimizer state and average by shards; and the weights too, if they are not kept whole."""
        held = super().holds()
        if not self.divided:
            return held
        mine = self.owned_bytes()
        weights = held.weights if self.keep else self.shard_bytes + self.buffers
        if self.keep and self.half is not None:
            weights += mine - sum(w.numel() * (w.element_size() - self.half.itemsize) for w in self.weights.values())
        return self.at_home(Held(weights, 0, self.optimizer_cost.state * mine, self.averaged_part * mine))

    def at_most(self) -> Held:
        held = self.holds()
        if not self.divided:
            return super().at_most()
        gradients = 0.0 if "offload" in self.options else self.owned_bytes()
        return replace(held, gradients=gradients, flying=self.flying_at_most())

    def flying_at_most(self) -> float:
        """A few buckets of whole gradients, or of whole weights too."""
        own = size(self.belongings.parameters.values()) if not self.keep else 0
        return min(WHOLE_BUCKETS * bucket.SIZE, own + size(self.weights.values()))

    def owned_bytes(self) -> float:
        """What this rank owns of the weights that learn."""
        return self.share_of(self.weights)

    def share_of(self, parameters: Mapping[str, nn.Parameter]) -> float:
        """What a rank owns of these parameters. A few elements more are there so that all own equally many."""
        return size(parameters.values()) / self.shards

    def at_home(self, held: Held) -> Held:
        """The same without what is in the CPU's memory."""
        if "offload" not in self.options:
            return held
        shard = self.shard_bytes if self.half is not None or not self.keep else 0
        return replace(held, weights=held.weights - shard, optimizer=0, average=0)

    @property
    def shard_bytes(self) -> float:
        """What this rank owns of all weights that are sharded."""
        return self.owned_bytes()

    def on_host(self) -> Held:
        if not self.divided or "offload" not in self.options:
            return Held()
        mine = self.owned_bytes()
        return Held(self.shard_bytes, mine, self.optimizer_cost.state * mine, self.averaged_part * mine)

    # ---- its storage ----

    def make_storage(self) -> Storage:
        if self.world.size == 1 or not self.weights:
            return super().make_storage()
        return Buckets(self.weights, self.sharing, self.buckets(self.weights))

    def buckets(self, weights: Mapping[str, nn.Parameter]) -> list[Bucket]:
        return [self.bucket(part) for part in self.parts(weights)]

    def bucket(self, part: Mapping[str, nn.Parameter]) -> Bucket:
        return Bucket(part, self.sharing)

    def weights_and_others(self) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
        """All parameters that the player stores: those that learn, and the others.

        A player that follows another one is laid out like it.
        """
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
        home = torch.device("cpu") if "offload" in self.options else None
        dtype = torch.bfloat16 if "bf16" in self.options else None
        return Sharing(size, rank, group, copies, self.keep, home, dtype)

    @property
    def sharing_group(self) -> dist.ProcessGroup:
        return self.sharing.group

    @cached_property
    def mesh(self) -> DeviceMesh | None:
        """A row of ranks shares one copy; a column of ranks owns the same shard. None if all ranks share one copy."""
        if "hybrid" not in self.options:
            return None
        size, ranks = self.shards, self.world.size
        if size == ranks:
            return None
        mesh = init_device_mesh(self.world.device.type, (ranks // size, size), mesh_dim_names=("copies", "shards"))
        for group in mesh.get_all_groups():
            private.limit(group, self.world.groups.timeout)
        return mesh

    def release(self) -> None:
        super().release()
        self.__dict__.pop("sharing", None)
        if (mesh := self.__dict__.pop("mesh", None)) is not None:
            for group in mesh.get_all_groups():
                dist.destroy_process_group(group)
