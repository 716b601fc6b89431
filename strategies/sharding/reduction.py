"""How a learner's gradients are averaged over the ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gan import later, ranks
from gan.files.errors import UserError
from strategies.sharding.bucket import PendingReduction
from strategies.sharding.storage import Buckets, Storage
from strategies.sharding.unshard_on_read import UnshardOnRead
from strategies.world import agree


class Reduction:
    """One player's gradients in a phase: `arm` before each backward, `finish` after the last one. For one device."""

    reduces_in_backward = True  # the weights have their whole gradients after the last backward
    trying = False  # whether the phase is played for a trial

    def __init__(self, storage: Storage, device: torch.device) -> None:
        self.storage, self.device = storage, device
        self.unreached: set[str] = set()  # by the loss of any rank; plain torch has no gradient for them anyway

    @property
    def stepped(self) -> Sequence[nn.Parameter]:
        """The weights that have a gradient on some rank, so that the optimizer moves them."""
        return [weight for name, weight in self.storage.weights.items() if name not in self.unreached]

    def arm(self, loss: Tensor, last: bool) -> Tensor:
        """Prepare for the backward of this loss. `last`: it is the backward of the phase's last micro-batch."""
        return loss

    def finish(self, scale: float) -> Tensor:
        """Complete the gradients and divide them by the loss scale. Returns their `norms`.

        A weight that the loss did not reach has no gradient, as in plain torch.
        """
        gradients = [weight.grad for weight in self.storage.weights.values() if weight.grad is not None]
        if scale != 1 and gradients:
            torch._foreach_mul_(gradients, 1 / scale)
        return self.norms()

    def norms(self) -> Tensor:
        """The norm of each gradient as it is now, the same on all ranks: of each weight, or of each that has one."""
        gradients = [weight.grad for weight in self.storage.weights.values() if weight.grad is not None]
        return torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(0, device=self.device)

    def ask_reached(self, phase: str) -> None:
        """After `finish`: if a gradient may be zero, find out later whether a loss has reached its weight."""

    def saw(self, phase: str, norms: Sequence[float]) -> None:
        """The norms have been read: if a gradient is zero, find out now, unless it has been asked."""

    def drop(self) -> None:
        """No gradient stays from one phase to the next."""
        for weight in (*self.storage.weights.values(), *self.storage.owned.values()):
            weight.grad = None

    def release(self) -> None:
        """Remove every hook from the weights."""


class GroupReduction(Reduction):
    """A reduction over the ranks of a group, which leaves zeros where a loss has reached a weight on no rank.

    [Note: weights that the loss did not reach]
    Plain torch leaves the gradient of such a weight None, and its optimizer skips it. With zeros Adam would still move
    the weight. So ranks tell each other which weights they have reached, by one byte a weight, but only if some
    gradient is exactly zero: all ranks see the same norms. A weight without influence stays so for many steps. So if
    there was a zero when the phase was last played, ranks do not read the norms first: what they tell each other is
    read together with the norms, and the CPU waits once for the device.
    """

    reduces_in_backward = False

    def __init__(self, storage: Storage, device: torch.device, group: dist.ProcessGroup) -> None:
        super().__init__(storage, device)
        self.group: dist.ProcessGroup | None = group
        self.hooks: list[RemovableHandle] = []
        self.reached: set[str] = set()  # the weights that this rank's loss has reached
        self.with_zeros: set[str] = set()  # the phases in which a gradient was exactly zero, when last played

    def norms(self) -> Tensor:
        """Those of whole weights, of which each rank has pieces, by one all-reduce of 8 bytes a weight."""
        there = {name: piece.grad for name, piece in self.storage.owned.items() if piece.grad is not None}
        own = dict(zip(there, torch._foreach_norm(list(there.values())) if there else (), strict=True))
        zero = torch.zeros((), dtype=torch.float64, device=next(iter(there.values())).device if there else self.device)
        norms = torch.stack([own[name].double() if name in own else zero for name in self.storage.weights])
        squares = norms.square().to(self.device, non_blocking=True)
        dist.all_reduce(squares, group=self.storage.group)
        types = (weight.dtype.to_real() for weight in self.storage.weights.values())
        return squares.sqrt().to(reduce(torch.promote_types, types))

    def ask_reached(self, phase: str) -> None:
        self.unreached = set()
        if phase in self.with_zeros:
            own = torch.tensor([name in self.reached for name in self.storage.weights]).byte()
            reached = own.to(self.device, non_blocking=True)
            dist.all_reduce(reached, dist.ReduceOp.MAX, group=self.group)
            later.read(reached, self._drop_unreached)

    def saw(self, phase: str, norms: Sequence[float]) -> None:
        if 0 not in norms:
            self.with_zeros.discard(phase)
        elif phase not in self.with_zeros:
            self.with_zeros.add(phase)
            self.ask_reached(phase)
            later.now()

    def _drop_unreached(self, by_any: Sequence[float]) -> None:
        self.unreached = {name for name, reached in zip(self.storage.weights, by_any, strict=True) if not reached}
        for name in self.unreached:
            for weights in (self.storage.weights, self.storage.owned):
                if name in weights:
                    weights[name].grad = None

    def drop(self) -> None:
        super().drop()
        self.reached.clear()

    def release(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks, self.group = [], None  # a reference to the group would keep its threads


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
        self._pending = []  # those of a trial that has failed in its backward
        self._came.clear()
        self.in_turn = list(reversed(range(count))) if self.on_read is None else self.on_read.in_turn(count)
        with torch._C.DisableTorchFunctionSubclass():
            self._missing = [
                {name for name, weight in bucket.weights.items() if weight.requires_grad} for bucket in self.buckets
            ]
        self._ready, self._made = [], ranks.made
        self._after = (self.uneven or self.trying) and not (self.on_read is not None and self.on_read.piecewise)
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
                    f"(with torch.utils.checkpoint type use_reentrant=False; with reversible blocks call the network "
                    f"once in the loss, net(torch.cat([a, b]))), or because the loss has frozen it last; leave "
                    f"requires_grad_(False) out, for only learners require gradients"
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


class Joined(torch.autograd.Function):
    """The loss unchanged, joined to others by edges without a gradient. `begin` is called when backward begins."""

    @staticmethod
    def forward(ctx, begin: Callable[[], None] | None, loss: Tensor, *others: Tensor) -> Tensor:  # noqa: ANN001
        ctx.begin, ctx.others = begin, len(others)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, slope: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        if ctx.begin is not None:
            ctx.begin()
        return None, slope, *[None] * ctx.others


# A norm over the gradients of a rank's pieces is another one on each rank. A hook that clips by it, as
# torch.nn.utils.clip_grad_norm_ does, would scale each rank's pieces in its own way.


@contextmanager
def whole_gradients(reduction: Reduction) -> Iterator[None]:
    """Inside the `with`, the author's weights have whole gradients.

    What the code inside makes of the gradients is kept, and must be the same on all ranks. The weights must be whole.
    """
    storage = reduction.storage
    there = {id(weight) for weight in reduction.stepped}
    apart = storage.gradients_apart
    gathered = {name: w for name, w in storage.weights.items() if id(w) in there and (apart or w.grad is None)}
    _gather(storage, gathered)
    yield
    _keep(storage)
    for name, weight in gathered.items():
        if storage.owned.get(name) is not weight:
            weight.grad = None


def _gather(storage: Storage, weights: dict[str, nn.Parameter]) -> None:
    """Give these weights whole gradients. Each rank adds its pieces to zeros."""
    for dtype in dict.fromkeys(weight.dtype for weight in weights.values()):
        alike = {name: weight for name, weight in weights.items() if weight.dtype == dtype}
        device = next(iter(alike.values())).device
        flat = torch.zeros(sum(weight.numel() for weight in alike.values()), dtype=dtype, device=device)
        wholes = dict(zip(alike, flat.split([weight.numel() for weight in alike.values()]), strict=True))
        for name, whole in wholes.items():
            piece = storage.owned.get(name)
            if piece is not None and piece.grad is not None:
                share = storage.share_of(name, piece.grad)
                whole[share.start : share.stop].copy_(piece.grad.reshape(-1))
        dist.all_reduce(flat, group=storage.group)
        for name, weight in alike.items():
            weight.grad = wholes[name].view_as(weight).detach()  # a hook may change it while gradients are on


@torch.no_grad()
def _keep(storage: Storage) -> None:
    """Give each piece its part of the whole gradients. It is copied in place, because an engine may own the memory."""
    for name, piece in storage.owned.items():
        gradient = storage.weights[name].grad
        if gradient is piece.grad:
            continue
        if gradient is None:
            piece.grad = None
            continue
        share = storage.share_of(name, piece.detach())
        part = gradient.detach().reshape(-1)[share.start : share.stop]
        if piece.grad is None:
            piece.grad = part.to(piece.device, piece.dtype, copy=True)
        else:
            piece.grad.copy_(part)
