"""ddp: the whole player on every rank; dp: the same, for all players, in ranks that the person's process starts."""

import gc
import warnings
from functools import partial
from operator import gt

import torch
import torch.distributed as dist
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from gan.files.errors import UserError
from strategies import private
from strategies.policies.amounts import size_of
from strategies.policies.policy import Policy
from strategies.sharding import bucket
from strategies.sharding.reduction import GroupReduction, Joined, Reduction
from strategies.sharding.storage import Storage


class Ddp(Policy):
    """Gradients are averaged by torch's own DDP reducer while backward still runs.

    Communication, in order: nothing in forward; in a phase's last backward one all-reduce for each bucket; after it,
    only if some gradient is exactly zero, one byte for each weight (see [Note: weights that the loss did not reach] in
    sharding/reduction.py); nothing in the update.
    """

    name = "ddp"
    max_ranks = None
    communicates_only_in_its_turn = True

    @property
    def kept_gradients(self) -> float:
        """The reducer's buckets."""
        return size_of(self.weights.values()) if self.divided else 0.0

    def adopt_dry(self) -> None:
        """torch's reducer works on values, so a plan counts what it does."""

    def make_reduction(self) -> Reduction:
        return DdpReduction(self.storage, self.world.device, self.group)


class Dp(Ddp):
    """A rank of dp trains as a rank of ddp, and communicates the same.

    What differs is around the training: see [Note: ranks of one process] in processes/own_ranks.py, and `DealtLoader`
    in ../batches/loaders.py, which deals the batches of a plain loader out.
    """

    name = "dp"


class DdpReduction(GroupReduction):
    """The reducer of torch's DDP. A DDP module is built around the weights only for its reducer. It is never called.

    [Note: the reducer waits for every weight]
    A weight that the loss reaches on no rank, or on some ranks only, would hang it or leave its bucket unreduced. So
    `Joined` joins every weight to the loss by an edge without a gradient: the reducer's hooks fire, and nothing is
    computed.
    """

    norms = Reduction.norms  # gradients are whole
    reduces_in_backward = True

    def __init__(self, storage: Storage, device: torch.device, group: dist.ProcessGroup) -> None:
        super().__init__(storage, device, group)
        # Said of a weight with one row. Gradients of other layouts have been copied before the reducer sees them.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view strides")
        self.reducer: DistributedDataParallel | None = self._reducer()
        self.backward: int | None = None  # the one that communicates
        self.in_buckets: dict[str, Tensor] = {}  # gradients in the reducer's memory, which it writes again
        self.users: list[int] = []  # how many hold each, before the update
        self.armed = False  # whether the reducer waits for gradients
        self.hooks = [
            weight.register_post_accumulate_grad_hook(partial(self._note_reached, name))
            for name, weight in storage.weights.items()
        ]

    def _begin_again(self) -> None:
        if self.reducer is not None:
            self.reducer.process_group = None
            self.reducer = self._reducer()

    def _reducer(self) -> DistributedDataParallel:
        # Where autograd adds up each gradient: there the reducer puts a hook.
        self.nodes = [get_gradient_edge(weight).node for weight in self.storage.weights.values()]
        with warnings.catch_warnings():
            # Newer torch renames broadcast_buffers; torch 2.11 does not know the new name.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            return DistributedDataParallel(
                nn.ParameterList(self.storage.weights.values()),
                device_ids=None if self.device.type == "cpu" else [self.device.index],
                process_group=self.group,
                broadcast_buffers=False,
                init_sync=False,
                gradient_as_bucket_view=True,
                # By default the first bucket is small, so that it travels early. On a CPU no core is free for it.
                bucket_cap_mb=bucket.SIZE / 2**20 if self.device.type == "cpu" else None,
            )

    def _note_reached(self, name: str, weight: Tensor) -> None:
        if weight.grad is not None:
            # Beside a sparse gradient the reducer would add up the others wrongly.
            bucket.refuse_sparse(name, weight.grad)
            self.reached.add(name)
        if self.backward not in (None, private.running_backward()):
            raise UserError(
                f"weight '{name}' got a gradient in a backward inside of another one, and the reducer reads it too "
                f"early; with torch.utils.checkpoint type use_reentrant=False, otherwise type zero2 for its player"
            )

    def arm(self, loss: Tensor, last: bool) -> Tensor:
        """The reducer ignores every backward it was not armed for, so only the last one communicates."""
        self.backward = None
        if not last:
            return loss
        self._check_returned()
        self.in_buckets, self.users = {}, []
        weights = list(self.storage.weights.values())
        frozen = [weight for weight in weights if not weight.requires_grad]
        # The reducer waits for frozen weights too, and an edge can be made only to a weight that requires a gradient.
        for weight in frozen:
            weight.requires_grad_(True)
        if self.armed:  # an error in a trial has ended the last backward half-way
            self._begin_again()
        self.armed = True
        for weight in weights:
            if weight._backward_hooks or len(weight._post_accumulate_grad_hooks or ()) > 1:  # not ours alone
                private.only_gradients(weight)
        loss = Joined.apply(self._begin, loss, *weights)
        # After `weight.set_(...)`, as when a parametrization is removed, the reducer's hook is at a node of the past.
        assert loss.grad_fn is not None
        if [node for node, _ in loss.grad_fn.next_functions[-len(weights) :]] != self.nodes:
            self._begin_again()
        for weight in frozen:
            weight.requires_grad_(False)
        assert self.reducer is not None
        prepare_for_backward(self.reducer, loss)
        return loss

    def _begin(self) -> None:
        self.backward = private.running_backward()

    def finish(self, scale: float) -> Tensor:
        self.armed = False
        norms = super().finish(scale)
        there = {name: weight.grad for name, weight in self.storage.weights.items() if weight.grad is not None}
        self.in_buckets = {} if self.trying else there
        self.users = self._users()
        return norms

    def drop(self) -> None:
        super().drop()
        self.backward = None

    def _check_returned(self) -> None:
        if any(map(gt, self._users(), self.users)):
            gc.collect()  # what an error has left, say
            for name, now, before in zip(self.in_buckets, self._users(), self.users, strict=True):
                if now > before:
                    raise UserError(
                        f"an optimizer or a hook has kept the gradient of weight '{name}', and this backward writes "
                        f"into its memory; keep gradient.clone(), or let go of it before; a kept exception has it too"
                    )

    def _users(self) -> list[int]:
        return [private.users(gradient) for gradient in self.in_buckets.values()]

    def release(self) -> None:
        """The reducer is dropped: a reference would keep hooks and threads."""
        super().release()
        self.in_buckets, self.users = {}, []
        if self.reducer is not None:
            self.reducer.process_group = self.reducer = None
        self.nodes = []
