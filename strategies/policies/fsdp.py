"""fsdp: torch's FSDP2 shards everything of the player, block by block."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from gan.files.errors import UserError
from gan.phase import Phase
from strategies.amounts import size
from strategies.options.blocks import LayerGroups, find_blocks
from strategies.options.compile import refuse_compiled_by_author
from strategies.policies.sharded import Sharded
from strategies.sharding.fully_shard import FullyShard, FullyShardReduction, mesh_of
from strategies.sharding.reduction import Reduction
from strategies.sharding.saved_tensors import kept_as_places
from strategies.sharding.storage import Storage


class Fsdp(Sharded):
    """Each rank keeps its rows of every weight, also those of a frozen player; FSDP2 gathers a block while it runs.

    The units that are gathered together are the blocks that `Player(blocks=...)` names or that are found, and one more
    for all weights outside of them.

    Communication, in order: one all-gather of a block before its forward, and another one before its backward, which
    FSDP2 starts while the block before still computes; one all-gather of the weights outside of blocks, when the first
    is read; in the phase's last backward one reduce-scatter of each unit, when it has all of its gradients; after it 16
    bytes to check that all ranks gathered in the same order, and norms and zero gradients as in zero2; nothing in the
    update. A player that no phase reads moves nothing. `averaged` gathers once.

    Held on each rank between phases: everything / ranks, in whole rows. During a phase that reads the player: the
    weights outside of blocks, those of the blocks that run or are gathered ahead, and those of blocks that were read
    outside of a call; and whole gradients of the units that backward is working on.

    Options: `whole` frees nothing before the phase ends, as torch's `reshard_after_forward=False`: one all-gather, more
    memory. `hybrid` is a mesh of copies and shards, `offload` FSDP2's CPUOffloadPolicy, and `bf16` its
    MixedPrecisionPolicy. A phase of second order keeps the player whole. See [Note: what FSDP2 does not see] in
    sharding/fully_shard.py.
    """

    name = "fsdp"
    keep = False
    takes = (Sharded.takes | {"bf16", "whole"}) - {"compile"}

    def share_of(self, parameters: Mapping[str, nn.Parameter]) -> float:
        """Equally many rows of each weight."""
        total = 0.0
        for each in parameters.values():
            rows = each.shape[0] if each.ndim else 1
            total += -(-rows // self.shards) * each.nbytes / max(1, rows)
        return total

    @property
    def shard_bytes(self) -> float:
        return self.share_of(self.belongings.parameters)

    def flying_at_most(self) -> float:
        """What is outside of blocks; and two blocks, of which one is in two places; and gradients of two."""
        whole, blocks = size(self.belongings.parameters.values()), [size(each.parameters()) for each in self.blocks()]
        return whole * 2 if self.always_whole else whole - sum(blocks) + 5 * max(blocks, default=0)

    @property
    def always_whole(self) -> bool:
        return "whole" in self.options

    def make_storage(self) -> Storage:
        if not self.begins_sharded:
            return super().make_storage()
        weights, others = self.weights_and_others()
        readers = self.belongings.readers
        refuse_compiled_by_author(self.player, readers, self.name, f"zero3+compile,*={self.name}")
        dtypes = {each.dtype for each in (*weights.values(), *others.values())}
        kinds = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
        if len(kinds) > 1:
            raise UserError(
                f"player '{self.player.name}': its weights are {' and '.join(kinds)}, and FSDP2 gathers one kind of "
                f"numbers; type --strategy {self.player.name}=zero3,*={self.name}"
            )
        gpu = self.world.device.type != "cpu"
        half = "bf16" in self.options
        return FullyShard(
            weights,
            others,
            _root(self.player.module),
            self.blocks(),
            readers,
            self.sharing_group,
            self.name,
            mesh=mesh_of(self.group, self.world.device) if self.mesh is None else self.mesh,
            mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            if half
            else MixedPrecisionPolicy(),
            offload_policy=CPUOffloadPolicy(pin_memory=gpu) if "offload" in self.options else OffloadPolicy(),
        )

    def blocks(self) -> list[nn.Module]:
        """The modules whose weights are gathered together. A network without blocks is one unit."""
        try:
            found = find_blocks(self.player)
        except UserError:
            if self.player.blocks is not None:
                raise
            return []
        blocks = [block for _, block in found if not isinstance(block, LayerGroups)]
        return [block for block in blocks if block is not self.player.module]

    def make_reduction(self) -> Reduction:
        if not isinstance(self.storage, FullyShard) or not self.weights:
            return super().make_reduction()
        what = f"player '{self.player.name}' (policy '{self.name}')"
        return FullyShardReduction(self.storage, self.world.device, self.group, what)

    @contextmanager
    def hold(self, phase: Phase) -> Iterator[None]:
        """Inside, FSDP2 gathers and frees; see [Note: what FSDP2 does not see]."""
        held = super().hold(phase)
        if isinstance(self.storage, FullyShard):
            whole = phase.second_order or "whole" in self.options
            at_start = phase.second_order and self.learning and bool(self.weights)
            held = self.storage.during(phase.name, whole=whole, second_order=phase.second_order, at_start=at_start)
        try:
            with held:
                yield
        except RuntimeError as error:
            if "RegisterPostBackwardFunction" not in str(error):
                raise
            raise UserError(
                f"phase '{phase.name}': a block of a network under fsdp begins by writing in place into its input, as "
                f"nn.ReLU(inplace=True) does, and FSDP2 forbids that; give it inplace=False, or use zero3, not fsdp"
            ) from error

    def for_several_phases(self) -> AbstractContextManager[Any]:
        return kept_as_places() if isinstance(self.storage, FullyShard) else super().for_several_phases()

    def check_code(self) -> int | None:
        return self.storage.check_code() if isinstance(self.storage, FullyShard) else None

    @contextmanager
    def gathered(self, exact: bool = True) -> Iterator[None]:
        resting = self.storage.resting() if isinstance(self.storage, FullyShard) else nullcontext()
        with resting, super().gathered(exact):
            yield


def _root(network: nn.Module) -> nn.Module:
    """FSDP2 refuses a ModuleList and a ModuleDict, so they are put into a plain module."""
    if type(network).forward is not nn.Module.forward:
        return network
    around = nn.Module()
    around.network = network
    return around
