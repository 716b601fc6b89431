"""fsdp: everything of the player sharded, block by block, by torch's FSDP2, of which only public words are used."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle, fully_shard

from gan.files.errors import UserError, explained
from gan.phase import Phase
from strategies.accelerator import pins
from strategies.options.blocks import modules_of_blocks
from strategies.policies.zero3 import Zero3
from strategies.sharding import bucket
from strategies.sharding.bucket import Bucket, Sharing


class Fsdp(Zero3):
    """As zero3, but FSDP2 stores and gathers the weights, and what is gathered together is a block of the network.

    The blocks are those that `Player(blocks=...)` names or that are found. Weights outside of them, or in several, are
    in buckets as under zero3. In a block that has weights of two dtypes, or some that do not learn, these are gathered
    apart.

    Communication, in order: as zero3. `hybrid` is a mesh of copies and shards, `offload` FSDP2's CPUOffloadPolicy, and
    `bf16` its MixedPrecisionPolicy.

    Held on each rank: as zero3. While FSDP2 gathers a unit it has the memory of two.

    See [Note: what FSDP2 does not see].
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

    def bucket(self, part: Mapping[str, nn.Parameter]) -> Bucket:
        if self.world.device.type == "meta":
            return PlannedFsdpBucket(part, self.sharing)
        group = DeviceMesh.from_group(self.group, self.world.device.type) if self.mesh is None else self.mesh
        return FsdpBucket(part, self.sharing, group)

    @contextmanager
    def during(self, phase: Phase, trying: bool = False) -> Iterator[None]:
        freed = explained(
            f"phase '{phase.name}' computes with weights that FSDP2 has freed meanwhile, as one backward may that "
            f"needs the weights of several blocks; type Phase('{phase.name}', ..., second_order=True), or zero3",
            RuntimeError,
            saying="for storage of size 0",
        )
        with freed, super().during(phase, trying):
            yield

    @cached_property
    def blocks(self) -> list[nn.Module]:
        return modules_of_blocks(self.player)


class FsdpBucket(Bucket):
    """A bucket whose shard FSDP2 has, and which FSDP2 gathers in a phase.

    [Note: what FSDP2 does not see]
    FSDP2 expects that it wraps the network. It gathers a unit when its module is called, puts parameters of its own in
    the place of the author's, and reduces when backward has passed the module. So it does not notice a weight that is
    read outside of such a call; a weight that has changed since the forward; a weight for which one rank has no
    gradient, after which the ranks' reductions do not match; or a phase of second order, which needs the weights again.
    So here FSDP2 never sees the network. It shards a twin: a parameter of its own, as long as the bucket. When the unit
    is read (see unshard_on_read.py), FSDP2 gathers the twin, and the author's weights use its memory until it is freed.
    Gradients are reduced as in zero3.

    FSDP2 resizes the memory that it frees, and cannot once code has a numpy view of it. So between phases the weights
    are gathered into other memory.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], sharing: Sharing, mesh: DeviceMesh) -> None:
        self.mesh: DeviceMesh | None = mesh
        self.in_fsdp2 = False  # whether the whole weights are in memory of FSDP2
        self.twin: Any = nn.Module()  # to which FSDP2 gives methods
        super().__init__(weights, sharing)

    def memory(self) -> torch.Tensor:
        """Let FSDP2 make the shard, as its guide does for weights without values: on the meta device first."""
        home = self.sharing.home
        flat = torch.empty(self.length * self.sharing.size, dtype=self.dtype, device="meta")
        self.twin.flat = nn.Parameter(flat, requires_grad=False)
        fully_shard(
            self.twin,
            mesh=self.mesh,
            mp_policy=MixedPrecisionPolicy(self.compute_dtype),
            offload_policy=OffloadPolicy() if home is None else CPUOffloadPolicy(pin_memory=pins(self.device)),
        )
        self.twin.to_empty(device=home or self.device)
        sharded: Any = self.twin.flat  # FSDP2 has made it a DTensor
        return sharded.to_local().detach().zero_()

    def start_unshard(self, dtype: torch.dtype | None = None) -> None:
        if dtype is not None:
            super().start_unshard(dtype)
        else:
            with torch.inference_mode(False):  # else FSDP2 could not write into this memory later
                self.work = self.twin.unshard(async_op=True)

    def unshard(self, dtype: torch.dtype | None = None) -> None:
        if self.work is None:
            self.start_unshard(dtype)
        self.in_fsdp2 = False
        if isinstance(self.work, UnshardHandle):
            self.in_fsdp2 = True
            with torch.inference_mode(False):
                self.work.wait()
            self.whole = self.twin.flat.detach()
        super().unshard()

    def _hide(self) -> None:
        if not self._may_be_freed():
            raise UserError(
                "a loss reads a weight as a NumPy array, and FSDP2 cannot free memory that NumPy has seen; type "
                "weight.detach().clone().numpy(), or zero3 in place of fsdp"
            )
        super()._hide()

    def _may_be_freed(self) -> bool:
        return self.whole is None or not self.in_fsdp2 or self.whole.untyped_storage().resizable()

    def drop(self) -> None:
        frees = self._may_be_freed()
        super().drop()
        if self.twin is not None and frees:
            self.twin.reshard()

    def release(self) -> None:
        """The twin and FSDP2's objects refer to each other, and so to the group, whose threads would stay."""
        super().release()
        vars(self.twin).clear()
        self.mesh = self.twin = None


class PlannedFsdpBucket(Bucket):
    """For a plan. FSDP2 gathers into one piece of memory and copies that: both are there for a while."""

    def unshard(self, dtype: torch.dtype | None = None) -> None:
        if self.work is None:
            self.start_unshard(dtype)
        assert self.whole is not None
        torch.empty_like(self.whole)
        super().unshard(dtype)
