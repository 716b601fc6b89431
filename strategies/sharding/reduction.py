"""How a learner's gradients are averaged over the ranks. This class is for one device, with nothing to average."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.sharding.storage import Storage


class Reduction:
    """One player's gradients in a phase: `arm` before each backward, `finish` after the last one."""

    def __init__(self, storage: Storage, device: torch.device) -> None:
        self.storage, self.device = storage, device

    @property
    def stepped(self) -> Sequence[nn.Parameter]:
        """After `finish`: the weights that have a gradient on some rank, so that the optimizer moves them."""
        return [weight for weight in self.storage.weights.values() if weight.grad is not None]

    def arm(self, loss: Tensor, last: bool) -> Tensor:
        """Prepare for the backward of this loss. `last`: it is the backward of the phase's last micro-batch."""
        return loss

    def finish(self, scale: float) -> Tensor:
        """Complete the gradients and divide them by the loss scale. Returns the norm of each, the same on all ranks.

        A weight that the loss did not reach has no gradient, as in plain torch.
        """
        gradients = [weight.grad for weight in self.storage.weights.values() if weight.grad is not None]
        if scale != 1 and gradients:
            torch._foreach_mul_(gradients, 1 / scale)
        return self.norms()

    def norms(self) -> Tensor:
        """The norm of each gradient as it is now, the same on all ranks."""
        gradients = [weight.grad for weight in self.storage.weights.values() if weight.grad is not None]
        return torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(0, device=self.device)

    def drop(self) -> None:
        """No gradient stays from one phase to the next."""
        self.storage.drop_gradients()

    def release(self) -> None:
        """Remove every hook from the weights."""


def unreached(names: Sequence[str], norms: Tensor, reached: Iterable[str], group: dist.ProcessGroup) -> set[str]:
    """The weights that no rank's loss reached. See [Note: weights that the loss did not reach] in ddp.py."""
    zero = [name for name, norm in zip(names, norms.tolist(), strict=True) if norm == 0]
    if not zero:
        return set()
    was = torch.tensor([name in reached for name in zero], device=norms.device).byte()
    dist.all_reduce(was, dist.ReduceOp.MAX, group=group)
    return {name for name, any_ in zip(zero, was.tolist(), strict=True) if not any_}
