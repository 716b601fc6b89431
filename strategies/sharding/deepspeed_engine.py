"""DeepSpeed's engine, as the storage of a player and as the reduction of its gradients."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, autograd, nn
from torch.optim import Optimizer

from gan.files.errors import UserError
from strategies import private
from strategies.sharding.bucket import Bucket, Sharing, parts
from strategies.sharding.reduction import GroupReduction
from strategies.sharding.storage import Buckets


def package(device: torch.device) -> Any:
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # it would print a lot, on every rank
    # DeepSpeed reads this variable when it is imported.
    with mock.patch.dict(os.environ, DS_ACCELERATOR=os.environ.get("DS_ACCELERATOR", device.type)):
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops import __compatible_ops__

        # An operation for inference on CPUs. It would be compiled first, and it is not used here.
        __compatible_ops__["deepspeed_shm_comm"] = False
        _forget_old_groups(deepspeed)
        known = torch.device(get_accelerator().device_name()).type
    if known != device.type:
        raise UserError(
            f"DeepSpeed computes on {known} in this process and the run on {device.type}; type "
            f"DS_ACCELERATOR={device.type} in front of the command"
        )
    return deepspeed


def _forget_old_groups(deepspeed: Any) -> None:
    """Reset DeepSpeed if torch has new process groups, because DeepSpeed keeps the first ones that it saw."""
    if getattr(deepspeed, "world_of_phases", dist.group.WORLD) is not dist.group.WORLD:
        deepspeed.comm.comm.cdb = None
        deepspeed.utils.groups._release_process_group_references()
    deepspeed.world_of_phases = dist.group.WORLD


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


DTYPE = torch.float32  # what DeepSpeed computes with


class EngineBucket(Bucket):
    """A bucket of which the engine has a twin and this rank's shard. See [Note: twins]."""

    multiple = 2  # as an engine of stage 1 or 2 lays them out

    def __init__(self, weights: Mapping[str, nn.Parameter], sharing: Sharing, learns: bool) -> None:
        super().__init__(weights, sharing)
        assert self.whole is not None
        self.twin: Any = nn.Parameter(self.whole, requires_grad=learns)  # to which the engine gives attributes
        self.gather: Any = None

    def give(self, shard: Tensor, gather: Any) -> None:
        """The engine has its shard and, if it gathers no weights, their memory: from here on this is the bucket's."""
        self.take(shard)
        if gather is None:
            self.whole = self.twin.data
            self._show()
        else:
            self.gather, self.sharing = gather, replace(self.sharing, keep=False)
            self._hide()

    def unshard(self, dtype: torch.dtype | None = None) -> None:
        """For stage 3. The engine gathers from a copy of the shard."""
        self.twin.ds_tensor.data.copy_(self.shard)
        with self.gather([self.twin]):
            self.whole = self.twin.data
        self._show()

    def release(self) -> None:
        super().release()
        self.twin = self.gather = None


class Engine(Buckets):
    """DeepSpeed's engine for twins of buckets. `others` do not learn; stage 3 shards them too.

    [Note: twins]
    DeepSpeed expects that its engine wraps the network. Then it counts the gradients of each weight during the backward
    of its own loss. A second engine in that loss is a KeyError, and a gradient penalty is an IndexError. If the network
    inside is called directly, the weights are silently wrong. So our engine never sees the network. It is made for
    twins: parameters of its own, one as long as each bucket, whose memory the author's weights use. Phases run on the
    author's network with plain autograd, and the gradients of micro-batches add up in its weights. Then the twins get
    the gradients, and all of them are reduced together (`engine.coalesce_grad_reduction`). So whatever plain torch can
    differentiate is exact. The price: unlike in zero2, there is no reduction while backward still runs.

    [Note: pieces]
    DeepSpeed steps the rank's shard of a twin as one long weight. That would not equal plain Adam, which does not
    change a weight that the loss did not reach, and counts steps for each weight. So DeepSpeed gets a stand-in as its
    optimizer. The stand-in lets the player's own optimizer step on pieces of the shard, one for each weight, as in the
    zero policies.
    """

    learning: Sequence[EngineBucket]

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        others: Mapping[str, nn.Parameter],
        stage: int,
        world: Any,
        group: Any,
        config: Mapping[str, Any],
        what: str,
    ) -> None:
        deepspeed = package(world.device)
        whole = Sharing(world.size, world.rank, group)
        learning = [EngineBucket(part, whole, learns=True) for part in parts(weights)]
        buckets = [*learning, *(EngineBucket(part, whole, learns=False) for part in parts(others))]
        self.device, self.what, self.partitioned = world.device, what, stage == 3
        self._players_optimizer: Optimizer | None = None
        self._reduced = False
        twins = nn.Module()  # parameters without a network
        twins.twins = nn.ParameterList(bucket.twin for bucket in buckets)
        groups = [{"params": [bucket.twin]} for bucket in learning]  # each is laid out for itself
        local_rank = world.rank if world.device.index is None else world.device.index
        with mock.patch.dict(os.environ, LOCAL_RANK=os.environ.get("LOCAL_RANK", str(local_rank))):
            self.engine, *_ = deepspeed.initialize(
                model=twins,
                optimizer=_StandIn(groups, self._step) if learning else None,
                config=dict(config),
                dist_init_required=False,  # the process group exists already
            )
        private.limit(self.engine.data_parallel_group, world.groups.timeout)
        self.optimizer = self.engine.optimizer
        name = "fp32_partitioned_groups_flat" if self.partitioned else "single_partition_of_fp32_groups"
        self.longs: list[Tensor] = getattr(self.optimizer, name) if learning else []
        self.misplaced = ""  # a weight that the engine has not put where this code expects it
        for number, bucket in enumerate(buckets):
            shard = (self.longs[number] if number < len(learning) else bucket.twin.ds_tensor).data
            if not torch.equal(shard, bucket.shard.to(shard.device)):
                self.misplaced = next(iter(bucket.weights))
                break
            if self.partitioned:
                bucket.twin.ds_process_group = group  # its own: ranks may gather two players in different orders
            bucket.give(shard, deepspeed.zero.GatheredParameters if self.partitioned else None)
        super().__init__(weights, replace(whole, keep=not self.partitioned), learning, buckets[len(learning) :])

    def unshard(self, exact: bool = False) -> None:
        if self.partitioned or self.engine is None:
            super().unshard(exact)
            return
        self.keep_writes()
        if self.stale:
            self.optimizer.update_lp_params()
            self.stale = False

    def release(self) -> None:
        super().release()
        self.engine.destroy()
        self.engine = self.optimizer = None
        self.longs = []

    # ---- the update ----

    def step(self, optimizer: Optimizer, stepped: Sequence[nn.Parameter]) -> None:
        """Let the engine step. It calls `_step`, and then updates the weights from the result."""
        self._players_optimizer = optimizer
        self.keep_writes()
        self.engine.step()
        self._reduced = False
        if not self.engine.was_step_applied():
            raise UserError(
                f"{self.what}: DeepSpeed did not step, as the norm of all gradients is beyond float32; "
                f"try clip=1.0 or a lower learning rate"
            )
        if self.partitioned:
            self.shards_changed()
        autograd.graph.increment_version(stepped)
        for bucket in self.buckets:
            bucket.up_to_date()

    def _step(self) -> None:
        """DeepSpeed may call it several times in a step. After the first call no gradients are left."""
        if self._players_optimizer is not None:
            self._players_optimizer.step()
        for piece in self.owned.values():
            piece.grad = None

    def drop_reduced(self) -> None:
        """Remove the gradients of a skipped update from the engine, by a step without gradients."""
        if self._reduced:
            self.keep_writes()
            self._players_optimizer = None
            self.engine.step()
            self._reduced = False

    def reduce(self, scale: float) -> None:
        """Average the gradients over the ranks, and give the pieces their parts, divided by the scale."""
        self.keep_writes()
        for bucket in self.learning:
            gradients = bucket.take_gradients()
            if self.partitioned:
                bucket.twin.data = gradients  # it is empty, so it could not have a gradient
            bucket.twin.grad = gradients
        with self.engine.coalesce_grad_reduction():
            pass  # on leaving, the gradients of the twins are reduced
        self._reduced = True
        if self.longs[0].device != self.device:
            torch.accelerator.synchronize(self.device)  # wait until the gradients are on the CPU
        for number, (bucket, long) in enumerate(zip(self.learning, self.longs, strict=True)):
            if self.partitioned:
                bucket.twin.data = bucket.twin.data.new_empty(0)
            own = long.grad if long.grad is not None else self.optimizer.averaged_gradients[number][0]
            bucket.give_gradients(own.view(-1), scale)


class EngineReduction(GroupReduction):
    """The engine reduces after the last backward. Norms, and weights that were not reached, are as in zero2."""

    storage: Engine

    def finish(self, scale: float) -> Tensor:
        self.reached = {name for name, weight in self.storage.weights.items() if weight.grad is not None}
        self.storage.drop_reduced()
        self.storage.reduce(scale)
        return self.norms()


class _StandIn(Optimizer):
    """The optimizer that DeepSpeed gets. See [Note: pieces]."""

    def __init__(self, groups: Sequence[dict[str, Any]], step: Any) -> None:
        super().__init__(list(groups), {"lr": 0.0})
        self.let_step = step

    def step(self, closure: None = None) -> None:
        self.let_step()
