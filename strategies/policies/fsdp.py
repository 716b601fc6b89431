"""fsdp: everything of the player sharded, block by block, by torch's FSDP2."""

import math
from collections.abc import Iterator, Mapping
from functools import cached_property

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from strategies.amounts import size
from strategies.options.blocks import modules_of_blocks
from strategies.policies.sharded import WHOLE_BUCKETS
from strategies.policies.zero3 import Zero3
from strategies.sharding import bucket
from strategies.sharding.fsdp_bucket import FsdpBucket


class Fsdp(Zero3):
    """As zero3, but FSDP2 stores and gathers the weights, and what is gathered together is a block of the network.

    The blocks are those that `Player(blocks=...)` names or that are found. Weights outside of them, or in several, are
    in buckets as under zero3. In a block that has weights of two dtypes, or some that do not learn, these are gathered
    apart.

    Communication, in order: as zero3. `hybrid` is a mesh of copies and shards, `offload` FSDP2's CPUOffloadPolicy, and
    `bf16` its MixedPrecisionPolicy.

    Held on each rank: as zero3. While FSDP2 gathers a unit it has the memory of two.

    See [Note: what FSDP2 does not see] in sharding/fsdp_bucket.py.
    """

    name = "fsdp"
    takes = Zero3.takes - {"compile"}

    def parts(self, weights: Mapping[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
        """What is outside of blocks, and each block. A player that follows another one has the blocks of that one."""
        like = self if self.followed is None else self.followed
        assert isinstance(like, Fsdp)
        names = {id(each): name for name, each in like.belongings.parameters.items()}
        inside: dict[str | None, int] = {}
        for number, block in enumerate(like.blocks, 1):
            for name in (names.get(id(each)) for each in block.parameters()):
                inside[name] = number if name not in inside else 0
        found: dict[int, dict[str, nn.Parameter]] = {}
        for name, each in weights.items():
            found.setdefault(inside.get(name, 0), {})[name] = each
        for number, part in sorted(found.items()):
            yield from bucket.parts(part, most=math.inf if number else None)

    def flying_at_most(self) -> float:
        """A few blocks, of whatever size."""
        if self.always_whole:
            return super().flying_at_most()
        largest = max(size(part.values()) for each in self.weights_and_others() for part in self.parts(each))
        return min(WHOLE_BUCKETS * largest, size(self.belongings.parameters.values()) + size(self.weights.values()))

    def bucket(self, part: Mapping[str, nn.Parameter]) -> bucket.Bucket:
        group = DeviceMesh.from_group(self.group, self.world.device.type) if self.mesh is None else self.mesh
        return FsdpBucket(part, self.sharing, group)

    @cached_property
    def blocks(self) -> list[nn.Module]:
        return modules_of_blocks(self.player)
