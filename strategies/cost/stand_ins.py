"""Gives a policy that is played dry its storage and reduction; stand-ins where DeepSpeed's engine would need values."""

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from strategies.amounts import Group
from strategies.policies.ddp import Ddp
from strategies.policies.deepspeed import DeepSpeed2
from strategies.policies.fsdp import Fsdp
from strategies.policies.pipeline import Pipeline
from strategies.policies.policy import Policy
from strategies.policies.sharded import Sharded
from strategies.policies.zero1 import Zero1
from strategies.sharding.bucket import Bucket, Sharing, parts
from strategies.sharding.reduce_scatter import ReduceScatter
from strategies.sharding.storage import Buckets
from strategies.sharding.unshard_on_read import UnshardOnRead


def prepare(policy: Policy) -> None:
    """Give a policy on the meta device its storage and its reduction."""
    if isinstance(policy, Pipeline) and policy.divided:
        return
    if isinstance(policy, Sharded) and policy.divided and "offload" in policy.options:
        policy.sharing = replace(policy.sharing, home=policy.world.device)  # the CPU has values
    if isinstance(policy, Fsdp):
        policy.bucket = lambda part: UnitWithoutValues(part, policy.sharing)
    if isinstance(policy, Zero1):
        policy.storage = Sharded.make_storage(policy)  # of whole weights it gathers as much
    elif isinstance(policy, DeepSpeed2) and policy.divided:
        _prepare_engine(policy)
        return
    else:
        policy.storage = policy.make_storage()
    if not isinstance(policy, Ddp | Zero1):
        policy.reduction = policy.make_reduction()


def _prepare_engine(policy: DeepSpeed2) -> None:
    """Stages 1 and 2 keep whole weights, which are gathered after the update; stage 3 gathers them for a phase."""
    third = policy.stage == 3
    sharing = Sharing(policy.world.size, 0, policy.group, keep=not third)
    others = {name: each for name, each in policy.belongings.parameters.items() if name not in policy.weights}
    learning = [Bucket(part, sharing) for part in parts(policy.weights)]
    sharded_too = [Bucket(part, sharing) for part in parts(others)] if third else []
    policy.storage = Buckets(policy.weights, sharing, learning, sharded_too)
    if third:
        everything, readers = policy.belongings.parameters.values(), policy.belongings.readers
        policy.on_read = UnshardOnRead(everything, readers, policy.storage, policy.name)
    if policy.weights:
        policy.reduction = EngineReduction(policy)


class UnitWithoutValues(Bucket):
    """In place of FSDP2's unit. FSDP2 gathers into one piece of memory and copies that: both are there for a while."""

    def unshard(self, dtype: torch.dtype | None = None) -> None:
        if self.work is None:
            self.start_unshard(dtype)
        torch.empty_like(self.whole)
        super().unshard(dtype)


class EngineReduction(ReduceScatter):
    """An engine's: whole gradients are reduced after the last backward, in one more copy of each bucket."""

    def __init__(self, policy: DeepSpeed2) -> None:
        super().__init__(policy.storage, policy.world.device, policy.group, policy.name)
        self.scatters = policy.stage == 3

    def arm(self, loss: Tensor, last: bool) -> Tensor:
        return super().arm(loss, last=False)

    def finish(self, scale: float) -> Tensor:
        if self.scatters:
            return super().finish(scale)
        for bucket in self.buckets:
            flat = bucket.joined({name: each.grad for name, each in bucket.weights.items() if each.grad is not None})
            dist.all_reduce(flat, group=self.group)
            for weight in bucket.weights.values():
                weight.grad = None
            bucket.give_gradients(flat[bucket.first : bucket.first + bucket.length].clone())
        return self.norms()


def ranks_of(group: dist.ProcessGroup, policy: Policy) -> Group:
    """The ranks of a process group of this policy."""
    if isinstance(policy, Sharded) and group == policy.sharing.copies:
        return policy.copies
    if isinstance(policy, Sharded) and group == policy.sharing.group:
        return Group(policy.shards)
    return Group(policy.world.size)
