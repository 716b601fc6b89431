"""fsdp: everything of the player sharded, block by block, by torch's FSDP2."""

import math
from collections.abc import Iterator, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gan.files.errors import UserError
from strategies.options.blocks import LayerGroups, find_blocks
from strategies.paper.sharded import PaperBucket
from strategies.policies.zero3 import Zero3
from strategies.sharding import bucket
from strategies.sharding.fsdp_unit import Unit


class Fsdp(Zero3):
    """As zero3, but FSDP2 stores and gathers the weights, and what is gathered together is a block of the network.

    The blocks are those that `Player(blocks=...)` names or that are found. All weights outside of them are one unit
    more. In a block that has weights of two dtypes, or some that do not learn, these are units of their own.

    Communication, in order: as zero3. `hybrid` is a mesh of copies and shards, `offload` FSDP2's CPUOffloadPolicy, and
    `bf16` its MixedPrecisionPolicy.

    Held on each rank: as zero3. While FSDP2 gathers a unit it has the memory of two.

    See [Note: what FSDP2 does not see] in sharding/fsdp_unit.py.
    """

    name = "fsdp"
    takes = Zero3.takes - {"compile"}

    def parts(self, weights: Mapping[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
        """What is outside of blocks, and each block. A weight of several blocks belongs to none."""
        inside: dict[int, int] = {}
        for number, block in enumerate(self._blocks(), 1):
            for each in block.parameters():
                inside[id(each)] = number if id(each) not in inside else 0
        found: dict[int, dict[str, nn.Parameter]] = {}
        for name, each in weights.items():
            found.setdefault(inside.get(id(each), 0), {})[name] = each
        for number, part in sorted(found.items()):
            yield from bucket.parts(part, most=math.inf if number else None)

    def paper_bucket(self, part: Mapping[str, nn.Parameter]) -> PaperBucket:
        return PaperBucket(part, self.shards, self.half, twice=True)

    def bucket(self, part: Mapping[str, nn.Parameter]) -> Unit:
        group = DeviceMesh.from_group(self.group, self.world.device.type) if self.mesh is None else self.mesh
        return Unit(part, self.sharing, group)

    def _blocks(self) -> list[nn.Module]:
        """The modules whose weights are gathered together. A network without blocks is one unit."""
        try:
            found = find_blocks(self.player)
        except UserError:
            if self.player.blocks is not None:
                raise
            return []
        blocks = [block for _, block in found if not isinstance(block, LayerGroups)]
        return [block for block in blocks if block is not self.player.module]
