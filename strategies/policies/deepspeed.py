"""deepspeed1, deepspeed2 and deepspeed3: an engine of DeepSpeed shards a player's training."""

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gan.files.errors import UserError
from strategies.advice import instead_of, type_instead
from strategies.options.compile import refuse_compiled_by_author
from strategies.policies.amounts import Held, size_of
from strategies.policies.deepspeed_config import settings
from strategies.policies.policy import Policy
from strategies.sharding import deepspeed_engine
from strategies.sharding.bucket import Bucket, Sharing, parts
from strategies.sharding.deepspeed_engine import Engine, EngineReduction
from strategies.sharding.reduction import ReduceScatter, Reduction
from strategies.sharding.storage import Buckets, Storage
from strategies.sharding.unshard_on_read import UnshardOnRead

OWN_BUCKET = 4 * 6 * 2**20  # bytes that an engine of stage 3 keeps for reductions


class DeepSpeed2(Policy):
    """An engine of ZeRO stage 2 reduces the player's gradients, owns its optimizer state and gathers its weights.

    Communication, in order: nothing in forward and backward; after the last backward the engine reduces its gradients,
    a bucket of `reduce_bucket_size` at a time; one number a weight for the norms, and one byte for each weight if some
    gradient is exactly zero, as in ddp; in the update the engine gathers the weights. `averaged` gathers twice.

    Held on each rank: weights whole, and a copy of this rank's shard of them, which its optimizer works on; gradients
    (whole until they are reduced), optimizer state and average / ranks. With `offload` the shard of the weights, its
    gradients, optimizer state and average are in the CPU's memory. A frozen player is whole on each rank.

    See [Note: twins] and [Note: pieces] in sharding/deepspeed_engine.py.
    """

    name = "deepspeed2"
    max_ranks = None
    stage = 2
    package = "deepspeed"
    takes = frozenset({"offload", "config"})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        player, world = self.player, self.world
        self.settings = settings(player, self.name, self.stage, self.options)
        odd = {weight.dtype for weight in self.shared_out.values()} - {deepspeed_engine.DTYPE}
        if odd:
            kinds = ", ".join(str(kind).removeprefix("torch.") for kind in odd)
            precision = "" if any(kind.is_complex for kind in odd) else "--precision 32-true, or "
            raise UserError(
                f"player '{player.name}': strategy '{self.name}' computes in float32 and its weights are {kinds}; "
                f"type {precision}{instead_of('deepspeed', 'zero')}"
            )
        if world.size == 1 and "offload" in self.options:
            raise UserError(
                f"player '{player.name}': '{self.name}+offload' needs two processes or more, there is one; "
                f"leave offload out, or type --devices 2"
            )

    @property
    def shard_bytes(self) -> float:
        """A copy beside the whole weights."""
        return size_of(self.shared_out.values()) / self.world.size if self.divided else 0.0

    @property
    def owned_bytes(self) -> float:
        return size_of(self.weights.values()) / (self.world.size if self.divided else 1)

    def in_a_phase(self) -> Held:
        """The gradients are whole until they are reduced."""
        return replace(super().in_a_phase(), gradients=size_of(self.weights.values()))

    def adopt_dry(self) -> None:
        """An engine needs values. Buckets stand in for it: stages 1 and 2 keep whole weights, stage 3 gathers them."""
        if not self.divided:
            return
        third, device = self.stage == 3, self.world.device
        sharing = Sharing(self.world.size, 0, self.group, keep=not third)
        others = {name: each for name, each in self.belongings.parameters.items() if third and name not in self.weights}
        learning = [Bucket(part, sharing) for part in parts(self.weights)]
        self.storage = buckets = Buckets(
            self.weights, sharing, learning, [Bucket(part, sharing) for part in parts(others)]
        )
        if third:
            self.on_read = UnshardOnRead(self.belongings.readers, buckets, self.name)
        if self.weights:
            self.reduction = reduction = PlannedEngineReduction(buckets, device, self.group, self.name)
            reduction.scatters = third

    def make_storage(self) -> Storage:
        others = {name: weight for name, weight in self.shared_out.items() if name not in self.weights}
        what = f"player '{self.player.name}'"
        engine = Engine(self.weights, others, self.stage, self.world, self.group, self.settings, what)
        if engine.misplaced:
            import deepspeed

            raise UserError(
                f"player '{self.player.name}': DeepSpeed {deepspeed.__version__} lays out '{engine.misplaced}' in a "
                f"way that strategy '{self.name}' does not know; type pip install '.[deepspeed]', or "
                f"{type_instead(self.player.name, f'zero{self.stage}')}"
            )
        return engine

    def make_reduction(self) -> Reduction:
        return EngineReduction(self.storage, self.world.device, self.group)


class DeepSpeed1(DeepSpeed2):
    """As deepspeed2, with an engine of ZeRO stage 1: its gradients are whole on each rank until the update."""

    name = "deepspeed1"
    stage = 1


class DeepSpeed3(DeepSpeed2):
    """As deepspeed2, with an engine of ZeRO stage 3: the weights are sharded too, also those of a frozen player.

    Communication, in order: before a phase the engine gathers each learner, one all-gather for each bucket; it gathers
    another player when the phase's loss first reads it; after the last backward as deepspeed2; in the update only
    numbers. After the phase, weights are resharded. A player that no phase reads moves nothing. `averaged` gathers
    once.

    Held on each rank between phases: everything / ranks, the weights twice. While a phase uses a player, its weights
    are whole.
    """

    name = "deepspeed3"
    stage = 3
    keep = begins_sharded = False  # the engine shards what has values
    always_whole = True

    def make_storage(self) -> Storage:
        refuse_compiled_by_author(self.player, self.belongings.readers, self.name)
        storage = super().make_storage()
        self.on_read = UnshardOnRead(self.belongings.readers, storage, self.name)
        return storage

    @property
    def shard_bytes(self) -> float:
        """A copy for the optimizer too, if that is on the device."""
        return super().shard_bytes + (self.owned_bytes if self.divided and not self.offloaded else 0.0)

    @property
    def kept_gradients(self) -> float:
        return self.owned_bytes if self.divided and not self.offloaded else 0.0

    def between_phases(self) -> Held:
        """And a bucket of the engine's own."""
        return replace(super().between_phases(), flying=OWN_BUCKET if self.divided and self.weights else 0)


class PlannedEngineReduction(ReduceScatter):
    """For a plan. Whole gradients are reduced after the last backward, in one more copy of each bucket."""

    scatters = False  # as stage 3 does

    def arm(self, loss: Tensor, last: bool) -> Tensor:
        return super().arm(loss, last=False)

    def finish(self, scale: float) -> Tensor:
        if self.scatters:
            return super().finish(scale)
        for bucket in self.buckets:
            flat = bucket.take_gradients()
            dist.all_reduce(flat, group=self.group)
            bucket.give_gradients(flat[bucket.first : bucket.first + bucket.length].clone())
        return self.norms()
