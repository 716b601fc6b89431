"""How a learner's gradients are averaged over the ranks. This class is for one device, with nothing to average."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gan import later
from gan.files.errors import UserError
from strategies.sharding.storage import Storage


class Reduction:
    """One player's gradients in a phase: `arm` before each backward, `finish` after the last one."""

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
        weights, owned = self.storage.weights, self.storage.owned
        for each in (weights,) if owned is weights else (weights, owned):
            for weight in each.values():
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


# A rank's optimizer works on pieces of the weights, so a norm over their gradients is another one on each rank. A hook
# that clips by it, as torch.nn.utils.clip_grad_norm_ does, would scale each rank's pieces in its own way.


@contextmanager
def whole_gradients(reduction: Reduction, optimizer: Optimizer, names: Sequence[Sequence[str]]) -> Iterator[None]:
    """Inside the `with`, the optimizer's groups have the author's weights, with whole gradients.

    What the code inside makes of the gradients is kept, and must be the same on all ranks. `names` are those of the
    weights in each of the optimizer's groups. The weights must be whole.
    """
    storage = reduction.storage
    there = {id(weight) for weight in reduction.stepped}
    apart = storage.gradients_apart
    gathered = {name: w for name, w in storage.weights.items() if id(w) in there and (apart or w.grad is None)}
    _gather(storage, gathered)
    pieces, state = [parameters["params"] for parameters in optimizer.param_groups], optimizer.state
    optimizer.state = PiecesOfState(state, storage) if storage.cut else state
    for parameters, members in zip(optimizer.param_groups, names, strict=True):
        parameters["params"] = [storage.weights[name] for name in members]
    try:
        yield
    finally:
        for parameters, own in zip(optimizer.param_groups, pieces, strict=True):
            parameters["params"] = own
        if optimizer.state is not state:
            left = dict(optimizer.state)
            state.clear()
            state.update(left)
            optimizer.state = state
        for name in storage.weights.keys() - storage.owned.keys():  # of another rank, where the hook does the same
            state.pop(storage.weights[name], None)
    _keep(storage)
    for name, weight in gathered.items():
        if storage.owned.get(name) is not weight:
            weight.grad = None


class PiecesOfState(defaultdict):
    """An optimizer's state where a hook sees whole weights. To ask it for a weight is an error, because it has pieces.

    Without that a hook would find nothing, and pass on without a word.
    """

    def __init__(self, state: Mapping[Any, Any], storage: Storage) -> None:
        super().__init__(dict, state)
        self.wholes = {id(weight) for name, weight in storage.weights.items() if storage.owned.get(name) is not weight}

    def _checked(self, weight: Any) -> Any:
        if id(weight) in self.wholes:
            raise UserError(
                "on_before_optimizer_step uses optimizer.state of a weight, of which this rank's optimizer has a "
                "piece; optimizer.state.clear(), and what is done to all of optimizer.state.values() alike, are right; "
                "else type ddp for this player"
            )
        return weight

    def __getitem__(self, weight: Any) -> Any:
        return super().__getitem__(self._checked(weight))

    def __setitem__(self, weight: Any, value: Any) -> None:
        super().__setitem__(self._checked(weight), value)

    def __contains__(self, weight: object) -> bool:
        return super().__contains__(self._checked(weight))

    def get(self, weight: Any, default: Any = None) -> Any:
        return super().get(self._checked(weight), default)


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
