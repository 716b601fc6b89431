"""ddp: the whole player on every rank."""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gan.phase import Player
from strategies.policies.policy import Policy, World


class Replicated(Policy):
    """Gradients are averaged by torch's own DDP reducer while backward still runs.

    Communication, in order: nothing in forward; in a phase's last backward one all-reduce a bucket, in a
    process group of the player's own; nothing in the update. Afterwards, only if some gradient came out
    exactly zero, one byte for each such weight (see [Note: weights that the loss did not reach]).

    The network stays the author's: DDP is built around it for its reducer and never called.

    [Note: weights that the loss did not reach]
    A reducer waits for every weight, so a weight that the loss reaches on no rank, or on some only, would
    hang it or leave its bucket unreduced. `_Reach` joins every weight to the loss with an edge that carries
    no gradient: it fires the reducer's hooks and costs no arithmetic. Plain torch leaves such a weight's
    gradient None, and its optimizer skips it; the reducer would leave zeros, with which Adam still moves.
    Whether *any* rank reached it is therefore asked, but only about gradients that are zero to the last bit,
    a question that all ranks see alike because they hold the same reduced gradients.
    """

    name = "ddp"
    max_ranks = None

    def __init__(self, player: Player, world: World, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(player, world, options)
        self.reducer: DistributedDataParallel | None = None
        self.reached: set[int] = set()

    def adopt(self, training: bool) -> None:
        """Build the reducer around the network in place."""
        super().adopt(training)
        if not training or self.world.size == 1 or not self.weights:
            return
        with warnings.catch_warnings():
            # Newer torch renames broadcast_buffers; torch 2.11 does not know the new name.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")
            self.reducer = DistributedDataParallel(
                self.player.module,
                device_ids=None if self.world.device.type == "cpu" else [self.world.device.index],
                process_group=self.group,
                broadcast_buffers=False,
                init_sync=False,
                gradient_as_bucket_view=True,
            )
        self.hooks = [
            weight.register_post_accumulate_grad_hook(partial(self._note_reached, index))
            for index, weight in enumerate(self.weights.values())
        ]

    def _note_reached(self, index: int, weight: Tensor) -> None:
        if weight.grad is not None:
            self.reached.add(index)

    def arm(self, loss: Tensor, last: bool) -> Tensor:
        """The reducer ignores every backward it was not armed for, so only the last one communicates."""
        if self.reducer is None or not last:
            return loss
        loss = _Reach.apply(loss, *self.weights.values())
        prepare_for_backward(self.reducer, loss)
        return loss

    def finish(self, scale: float) -> Tensor:
        """The reducer has done its work in backward; weights that no rank reached lose their zeros."""
        norms = super().finish(scale)
        if self.reducer is None:
            return norms
        zero = [index for index, norm in enumerate(norms.tolist()) if norm == 0]
        if zero:
            reached = torch.tensor([index in self.reached for index in zero], device=self.world.device).byte()
            dist.all_reduce(reached, dist.ReduceOp.MAX, group=self.group)
            weights = list(self.weights.values())
            for index, was_reached in zip(zero, reached.tolist(), strict=True):
                if not was_reached:
                    weights[index].grad = None
        return norms

    def drop_gradients(self) -> None:
        """A new phase has reached nothing yet."""
        super().drop_gradients()
        self.reached.clear()

    def release(self) -> None:
        """Take the hooks off the weights; dropping the reducer takes its own off."""
        if self.reducer is not None:
            for hook in self.hooks:
                hook.remove()
            self.reducer = None
        super().release()


class _Reach(torch.autograd.Function):
    """The loss unchanged, joined to every weight. See [Note: weights that the loss did not reach]."""

    @staticmethod
    def forward(ctx, loss: Tensor, *weights: Tensor) -> Tensor:  # noqa: ANN001
        ctx.weights = len(weights)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        return gradient, *[None] * ctx.weights
