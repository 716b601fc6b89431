"""Where the weights of a player in stages are, and how their gradients are averaged."""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gan.files.tensors import Share
from strategies.pipelining.pipe import Pipe
from strategies.sharding import bucket
from strategies.sharding.reduction import GroupReduction, Joined
from strategies.sharding.resharded_parameter import ReshardedParameter, hide, show
from strategies.sharding.storage import OneOwner


class StageStorage(OneOwner):
    """A rank has the parameters of its stages, whole; between `unshard` and `reshard` also those of the others.

    `parts` are the parameters of each rank of the group, also those that do not learn.
    """

    gradients_apart = True

    def __init__(
        self, weights: Mapping[str, nn.Parameter], parts: Sequence[Mapping[str, nn.Parameter]], group: dist.ProcessGroup
    ) -> None:
        super().__init__(weights, parts, group)
        self.of_others = [each for part in parts if part is not self.own for each in part.values()]
        _give_memory(each for each in self.own.values() if isinstance(each, ReshardedParameter))  # made on meta
        self.whole = True  # whether the author's parameters of other stages have memory
        self.released = False
        self.reshard()

    @property
    def unsharded(self) -> bool:
        return self.whole and not self.stale

    def unshard(self, exact: bool = False) -> None:
        if self.unsharded or self.released:
            return
        if not self.whole:
            _give_memory(self.of_others)
        self._send([*self.own.values(), *self.of_others], stepped=False)  # a graph may be kept for the next phase
        self.whole = True

    def reshard(self) -> None:
        if not self.whole or self.released:
            return
        for weight in self.of_others:
            if isinstance(weight, ReshardedParameter):
                continue
            nothing = torch.nan if weight.is_floating_point() else 0
            hide(weight, torch.full((), nothing, dtype=weight.dtype, device=weight.device))
        self.whole = False

    def step(self, optimizer: Optimizer, stepped: Sequence[nn.Parameter]) -> None:
        optimizer.step()
        self.shards_changed()

    def tensors(self) -> list[Tensor]:
        return list(self.owned.values())

    def shares(self) -> dict[Tensor, Share | None]:
        return {each: Share.whole(each) if part is self.own else None for part in self.parts for each in part.values()}

    def release(self) -> None:
        """Communicates nothing, so a weight of another stage stays away."""
        self.whole, self.released = True, True
        super().release()


def _give_memory(weights: Iterable[nn.Parameter]) -> None:
    for weight in weights:
        show(weight, torch.empty(weight.numel(), dtype=weight.dtype, device=weight.device))


class StageReduction(GroupReduction):
    """A stage's gradients are those of all samples of its pipeline; they are added up over the pipelines, if several.

    `group` has all ranks. `pipes` are the player's.
    """

    storage: StageStorage

    def __init__(
        self, storage: StageStorage, device: torch.device, group: dist.ProcessGroup, pipes: Sequence[Pipe]
    ) -> None:
        super().__init__(storage, device, group)
        self.pipes = pipes

    def arm(self, loss: Tensor, last: bool) -> Tensor:
        """The backward of a call is the work of all ranks, also of one whose loss makes no use of the call."""
        called: list[Tensor] = []
        for pipe in self.pipes:
            called += pipe.called
            pipe.last, pipe.called = last, []
        ahead = [each for each in called if getattr(each.grad_fn, "pieces", None)]
        return Joined.apply(None, loss, *ahead) if ahead else loss

    def finish(self, scale: float) -> Tensor:
        """An all-reduce of each bucket of gradients over the copies, and one for the norms."""
        for pipe in self.pipes:
            pipe.finish()
        own = self.storage.owned
        self.reached = {name for name, weight in own.items() if weight.grad is not None}
        for weight in own.values():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        gradients = {name: weight.grad for name, weight in own.items() if weight.grad is not None}
        copies = self.pipes[0].copies
        for names in bucket.parts(own) if copies is not None else ():
            part = [gradients[name] for name in names]
            flat = torch.cat([gradient.flatten() for gradient in part])
            dist.all_reduce(flat, group=copies)
            for gradient, values in zip(part, flat.split([each.numel() for each in part]), strict=True):
                gradient.copy_(values.view_as(gradient))
        if gradients:
            # In a trial as one device each rank of a pipeline may have computed the whole network by itself.
            ranks = dist.get_world_size(self.group) // (self.pipes[0].size if self.storage.unsharded else 1)
            torch._foreach_mul_(list(gradients.values()), 1 / (scale * ranks))
        return self.norms()

    def drop(self) -> None:
        for pipe in self.pipes:
            pipe.drop()
        super().drop()

    def release(self) -> None:
        super().release()
        self.pipes = ()
