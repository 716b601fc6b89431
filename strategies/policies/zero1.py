"""zero1: the whole player on every rank, its optimizer state and average shared out."""

from torch import Tensor, autograd

from strategies.policies.ddp import Replicated
from strategies.policies.sharded import Owner


class Zero1(Owner, Replicated):
    """Like ddp, but each rank steps its own equal share of the elements.

    Communication, in order: nothing in forward; in a phase's last backward one all-reduce a bucket of DDP's, and
    what ddp asks about weights out of reach; in the update one all-gather of the weights, in place. `averaged`
    gathers twice, there and back.

    Held on each rank: weights and gradients whole; optimizer state and average / ranks.
    """

    name = "zero1"

    def update(self, norm: Tensor) -> None:
        """Step on pieces of the reduced gradients, and gather what the others made of theirs."""
        stepped = [weight for weight in self.weights.values() if weight.grad is not None]
        for bucket in self.buckets:
            for name, piece in bucket.pieces.items():
                gradient = bucket.weights[name].grad
                piece.grad = None if gradient is None else bucket.cut(name, gradient)
        super().update(norm)
        self.spread()
        # A graph from before must not go backward over new weights; plain torch notices by this.
        if self.buckets:
            autograd.graph.increment_version(stepped)
