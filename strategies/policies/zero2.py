"""zero2: the whole player on every rank; gradients, optimizer state and average shared out."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, autograd, nn

from gan.errors import UserError
from gan.phase import Player
from strategies.policies.policy import World
from strategies.policies.sharded import Owner
from strategies.sharding.bucket import Reduction


class Zero2(Owner):
    """Each rank keeps and steps its own equal share of the gradients.

    Communication, in order: nothing in forward; in a phase's last backward one reduce-scatter a bucket, as soon as
    all of its gradients are there; after it one number a weight for the norms, and one byte for each weight whose
    gradient is exactly zero, as in ddp; in the update one all-gather of the weights, in place. `averaged` gathers
    twice, there and back.

    Held on each rank: weights whole; gradients (whole while backward makes them), optimizer state and average / ranks.

    By hand, because FSDP2 ties collectives to the forwards and backwards of modules, and games call networks by their
    own methods, several times a phase, and by branches that differ from rank to rank. Here, as in DDP, a weight is
    ready once all paths of the backward have met in it, and buckets leave in one order on all ranks, the last first;
    one that is never ready leaves after the backward.
    """

    name = "zero2"
    takes = Owner.takes | {"bf16"}

    def __init__(self, player: Player, world: World, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(player, world, options)
        self.hooks: list[Any] = []
        self.reached: set[str] = set()
        self.stepped: list[nn.Parameter] = []
        self._ready_for: list[set[str]] = []
        self._leaving: list[Reduction] = []
        self._reducing = False

    def cut(self) -> None:
        """Also listen to the weights' gradients."""
        super().cut()
        for number, bucket in enumerate(self.buckets):
            for name, weight in bucket.weights.items():
                hook = partial(self._saw_gradient, number, name)
                self.hooks.append(weight.register_post_accumulate_grad_hook(hook))

    def arm(self, loss: Tensor, last: bool) -> Tensor:
        """Only the last backward communicates."""
        self._reducing = last and bool(self.buckets)
        self._ready_for = [set(bucket.weights) for bucket in self.buckets]
        return loss

    def _saw_gradient(self, number: int, name: str, weight: Tensor) -> None:
        self.reached.add(name)
        if not self._reducing:
            return
        if name not in self._ready_for[number]:
            raise UserError(
                f"weight '{name}' of player '{self.player.name}' got a gradient twice in one backward, and "
                f"'{self.name}' has sent the first away; with torch.utils.checkpoint type use_reentrant=False"
            )
        self._ready_for[number].remove(name)
        while len(self._leaving) < len(self.buckets) and not self._ready_for[self._next]:
            self._send()

    @property
    def _next(self) -> int:
        return len(self.buckets) - 1 - len(self._leaving)

    def _send(self) -> None:
        if len(self._leaving) > 1:
            self._leaving[-2].wait()  # two on their way: what they read is whole gradients, which must not add up
        self._leaving.append(self.buckets[self._next].reduce())

    def finish(self, scale: float) -> Tensor:
        """Send what is left, wait for all, and learn the whole weights' norms from those of the pieces."""
        if not self.buckets:
            return super().finish(scale)
        self._reducing = False
        while len(self._leaving) < len(self.buckets):
            self._send()
        for bucket, reduction in zip(reversed(self.buckets), self._leaving, strict=True):
            own = reduction.wait()
            bucket.hand_out(own if scale == 1 else own.mul_(1 / scale))
        self._leaving = []
        norms = self._norms()
        self._forget_unreached(norms)
        return norms

    def _norms(self) -> Tensor:
        names = {name: number for number, name in enumerate(self.weights)}
        squares = torch.zeros(len(names), dtype=torch.float64, device=self.world.device)
        if self.owned:
            own = torch.stack([norm.double() for norm in torch._foreach_norm([p.grad for p in self.owned.values()])])
            squares[[names[name] for name in self.owned]] = own.square().to(squares.device)
        dist.all_reduce(squares, group=self.sharing.group)
        return squares.sqrt().to(self.buckets[0].kind)

    def _forget_unreached(self, norms: Tensor) -> None:
        """See [Note: weights that the loss did not reach] in ddp.py."""
        names = list(self.weights)
        zero = [names[number] for number, norm in enumerate(norms.tolist()) if norm == 0]
        out_of_reach = set()
        if zero:
            reached = torch.tensor([name in self.reached for name in zero], device=self.world.device).byte()
            dist.all_reduce(reached, dist.ReduceOp.MAX, group=self.group)
            out_of_reach = {name for name, was in zip(zero, reached.tolist(), strict=True) if not was}
        for name in out_of_reach & self.owned.keys():
            self.owned[name].grad = None
        self.stepped = [weight for name, weight in self.weights.items() if name not in out_of_reach]

    def update(self, norm: Tensor) -> None:
        """Step the share; then its new weights are everyone's."""
        super().update(norm)
        self.spread()
        # A graph from before must not go backward over new weights; plain torch notices by this.
        if self.buckets:
            autograd.graph.increment_version(self.stepped)

    def drop_gradients(self) -> None:
        """A new phase has reached nothing yet."""
        super().drop_gradients()
        self.reached.clear()

    def release(self) -> None:
        """Take the hooks off the weights."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        super().release()
