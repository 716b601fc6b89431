"""The reduction of zero2, zero3 and fsdp: a reduce-scatter of each bucket while backward still runs."""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from gan import ranks
from gan.files.errors import UserError
from strategies.sharding.bucket import PendingReduction
from strategies.sharding.reduction import GroupReduction
from strategies.sharding.storage import Buckets
from strategies.sharding.unshard_on_read import UnshardOnRead
from strategies.world import agree


class ReduceScatter(GroupReduction):
    """A bucket is reduced as soon as it has all of its gradients; each rank keeps its shard of them.

    As in DDP, a weight is ready when backward has added up its whole gradient. Buckets are reduced in the same order
    on all ranks: that in which backward comes to them, as far as `on_read` knows, or else the last one first. A bucket
    that is not ready during the backward is reduced after it.

    [Note: ranks that reach other weights]
    Samples may decide which layers run. A rank whose loss does not reach a weight reduces that weight's bucket after
    its backward. During its backward it may wait for another rank, in a sum over ranks such as a batch norm's. If that
    other rank waits for the bucket meanwhile, both wait for ever. So trials reduce after the backward, and compare
    which sums over ranks came before each bucket was ready. If ranks differ, the player is reduced after the backward
    from then on; its gradients are whole until then. Where weights are gathered in backward, such a game is refused:
    see `agree` in unshard_on_read.py.
    """

    def __init__(
        self,
        storage: Buckets,
        device: torch.device,
        group: dist.ProcessGroup,
        what: str,
        on_read: UnshardOnRead | None = None,
    ) -> None:
        """`what` names player and policy in an error; `group` has all ranks."""
        super().__init__(storage, device, group)
        self.buckets, self.what, self.on_read = storage.learning, what, on_read
        self.in_turn: list[int] = []  # the numbers of the buckets, in the order of reduction
        self._missing: list[set[str]] = []  # for each bucket, the weights that have no gradient yet
        self._came: set[str] = set()  # the weights that have one of this backward
        self._pending: list[PendingReduction] = []
        self._reducing = False
        self._ready: list[int] = []  # for each bucket with all of its gradients: the sums over ranks before it
        self._made = 0  # sums over ranks before this backward
        self._after = False  # whether buckets wait for the backward's end
        self.uneven = False  # whether ranks reach other weights
        self.hooks = [
            weight.register_post_accumulate_grad_hook(partial(self._saw_gradient, number, name))
            for number, bucket in enumerate(self.buckets)
            for name, weight in bucket.weights.items()
        ]

    def arm(self, loss: Tensor, last: bool) -> Tensor:
        """Only the last backward communicates."""
        self._reducing, count = last, len(self.buckets)
        self._came.clear()
        self.in_turn = list(reversed(range(count))) if self.on_read is None else self.on_read.in_turn(count)
        with torch._C.DisableTorchFunctionSubclass():
            self._missing = [
                {name for name, weight in bucket.weights.items() if weight.requires_grad} for bucket in self.buckets
            ]
        self._ready, self._made = [], ranks.made
        piecewise = self.on_read is not None and self.on_read.piecewise
        self._after = (self.uneven or self.trying) and not piecewise
        return loss

    def _saw_gradient(self, number: int, name: str, weight: Tensor) -> None:
        if weight.grad is not None:  # torch calls hooks also where an autograd.Function gives no gradient
            self.reached.add(name)
        if not self._reducing:
            return
        if name not in self._missing[number]:
            if name in self._came or number in self.in_turn[: len(self._pending)]:
                raise UserError(
                    f"weight '{name}' of {self.what} got a gradient when it was reduced already: twice in one backward "
                    f"(with torch.utils.checkpoint type use_reentrant=False), or because the loss has frozen it last; "
                    f"leave requires_grad_(False) out, for only learners require gradients"
                )
            self._reducing = False  # the loss has frozen its weights when it was done, so none was expected
            return
        self._came.add(name)
        self._missing[number].remove(name)
        while len(self._ready) < len(self.buckets) and not self._missing[self.in_turn[len(self._ready)]]:
            self._ready.append(ranks.made - self._made)
            if not self._after:
                self._start_next()

    def _start_next(self) -> None:
        if len(self._pending) > 1:
            self._pending[-2].wait()  # at most two at once: each holds a bucket of whole gradients
        number = self.in_turn[len(self._pending)]
        if self.on_read is not None:
            self.on_read.agree(("reduce", number))
        self._pending.append(self.buckets[number].reduce_scatter())

    def finish(self, scale: float) -> Tensor:
        """Reduce the remaining buckets. One all-reduce makes the norms of whole weights from those of their pieces."""
        self._reducing = False
        while len(self._pending) < len(self.buckets):
            self._start_next()
        if self.trying and not agree(self._ready, self.device, self.group):
            self.uneven = True
        for reduction in self._pending:
            reduction.give(scale)
        self._pending = []
        return self.norms()
