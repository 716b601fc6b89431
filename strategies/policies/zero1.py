"""zero1: the whole player on every rank, its optimizer state and average sharded."""

from torch import Tensor

from strategies.policies.ddp import DdpReduction
from strategies.policies.sharded import Sharded
from strategies.sharding.reduce_scatter import norms_of_pieces
from strategies.sharding.reduction import Reduction


class Zero1(Sharded):
    """Like ddp, but each rank steps its own equal share of the elements.

    Communication, in order: nothing in forward; in a phase's last backward one all-reduce for each of DDP's buckets;
    after it one byte for each weight whose gradient is exactly zero, as in ddp; in the update one all-gather of the
    weights, in place. `averaged` gathers twice: the averages, and then the weights again.

    Held on each rank: weights and gradients whole; optimizer state and average / ranks.
    """

    name = "zero1"
    communicates_only_in_its_turn = True

    def make_reduction(self) -> Reduction:
        if not self.storage.sharded:
            return super().make_reduction()
        return DdpReduction(self.storage, self.world.device, self.player.module, self.group)

    def finish(self, scale: float) -> Tensor:
        """Give each piece its part of the reduced gradients, because the optimizer steps on pieces."""
        norms = super().finish(scale)
        if self.storage.sharded:
            for bucket in self.storage.buckets:
                for name, piece in bucket.pieces.items():
                    gradient = bucket.weights[name].grad
                    piece.grad = None if gradient is None else bucket.piece_of(name, gradient)
        return norms

    def norms(self) -> Tensor:
        if not self.storage.sharded:
            return super().norms()
        return norms_of_pieces(self.storage, self.sharing.group, self.world.device)
