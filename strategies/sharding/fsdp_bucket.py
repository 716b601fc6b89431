"""torch's FSDP2 as what stores a bucket and gathers it. Only public words of FSDP2 are used."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle, fully_shard

from strategies.accelerator import pins
from strategies.sharding.bucket import Bucket, Sharing


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
        if isinstance(self.work, UnshardHandle):
            with torch.inference_mode(False):
                self.work.wait()
            self.whole = self.twin.flat.detach()
        super().unshard()

    def drop(self) -> None:
        super().drop()
        if self.twin is not None:
            self.twin.reshard()

    def release(self) -> None:
        """The twin and FSDP2's objects refer to each other, and so to the group, whose threads would stay."""
        super().release()
        vars(self.twin).clear()
        self.mesh = self.twin = None
