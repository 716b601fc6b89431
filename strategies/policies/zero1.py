"""zero1: the whole player on every rank, its optimizer state and average sharded."""

from torch import Tensor

from strategies.policies.ddp import DdpReduction
from strategies.policies.sharded import Sharded
from strategies.sharding.reduction import Reduction


class Zero1(Sharded):
    """Like ddp, but each rank steps its own equal share of the elements.

    Communication, in order: nothing in forward; in a phase's last backward one all-reduce a bucket of DDP's, and
    what ddp asks about weights that the loss did not reach; in the update one all-gather of the weights, in place.
    `averaged` gathers twice, there and back.

    Held on each rank: weights and gradients whole; optimizer state and average / ranks.
    """

    name = "zero1"

    def make_reduction(self) -> Reduction:
        if not self.storage.sharded:
            return super().make_reduction()
        return DdpReduction(self.storage, self.world.device, self.player.module, self.group)

    def update(self, norm: Tensor) -> None:
        """The optimizer steps on pieces, so they need their parts of the reduced gradients."""
        if self.storage.sharded:
            for bucket in self.storage.buckets:
                for name, piece in bucket.pieces.items():
                    gradient = bucket.weights[name].grad
                    piece.grad = None if gradient is None else bucket.piece_of(name, gradient)
        super().update(norm)
