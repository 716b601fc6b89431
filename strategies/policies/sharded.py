"""What zero1, zero2, zero3 and fsdp have in common: each rank owns a part of a player's elements."""

from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from gan.errors import UserError
from strategies import private
from strategies.policies.policy import Policy
from strategies.sharding.bucket import Sharing
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
    takes = Policy.takes | {"offload", "hybrid"}
    keep = True  # whole weights between phases

    def make_storage(self) -> Storage:
        if self.world.size == 1 or not self.weights:
            return super().make_storage()
        return Buckets(self.weights, self.sharing)

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
        size, ranks = self.options["hybrid"] or self.world.local, self.world.size
        if ranks % size:
            raise UserError(
                f"player '{self.player.name}': {ranks} ranks cannot be parted into groups of {size}, as "
                f"'{self.name}+hybrid:{size}' asks; type {self.name}+hybrid:N with an N that divides {ranks}"
            )
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
