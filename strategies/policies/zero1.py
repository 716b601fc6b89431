"""zero1: the whole player on every rank, its optimizer state and average sharded."""

from torch import Tensor

from gan.files.errors import UserError
from strategies.advice import type_instead
from strategies.policies.amounts import size_of
from strategies.policies.ddp import Ddp, DdpReduction
from strategies.policies.sharded import Sharded
from strategies.sharding.reduction import Reduction
from strategies.sharding.storage import DealtWeights, Storage, deal


class Zero1(Sharded):
    """Like ddp, but each rank steps its own equal share of the elements.

    Communication, in order: nothing in forward; in a phase's last backward one all-reduce for each of DDP's buckets;
    after it one byte for each weight if some gradient is exactly zero, as in ddp; in the update one all-gather of the
    weights, in place. `averaged` gathers twice: the averages, and then the weights again.

    Held on each rank: weights and gradients whole; optimizer state and average / ranks.

    [Note: whole weights]
    An optimizer that looks at whole weights (Muon, Shampoo) cannot step pieces. Then each rank owns some of the weights
    whole, and about as many elements as the others. After the step each owner broadcasts its weights; together that is
    as much as the all-gather. A rank holds at least the state of the largest weight that it owns.
    """

    name = "zero1"
    kept_gradients = Ddp.kept_gradients

    @property
    def owned_bytes(self) -> float:
        """An equal share, or the largest share of whole weights. See [Note: whole weights]."""
        if not self.divided or self.optimizer_cost.elementwise:
            return super().owned_bytes
        dealt = deal({name: weight.numel() for name, weight in self.weights.items()}, self.shards)
        return max(size_of(self.weights[name] for name in names) for names in dealt)

    def adopt_dry(self) -> None:
        """The reduction as in ddp. Of whole weights as much is gathered as of pieces."""
        if self.divided:
            self.storage = super().make_storage()

    def make_storage(self) -> Storage:
        whole = [type(each.optimizer).__name__ for each in self.updaters.values() if not each.elementwise]
        if not whole:
            return super().make_storage()
        if "offload" in self.options:
            raise UserError(
                f"player '{self.player.name}': {whole[0]} looks at whole weights, and zero1+offload steps pieces of "
                f"them; type {type_instead(self.player.name, without='offload')}"
            )
        self.check_apart()
        return DealtWeights(self.weights, self.sharing)

    def make_reduction(self) -> Reduction:
        return PieceReduction(self.storage, self.world.device, self.group)


class PieceReduction(DdpReduction):
    """As ddp's. Then each piece gets its part of the reduced gradients, because the optimizer steps on pieces."""

    def finish(self, scale: float) -> Tensor:
        norms = super().finish(scale)
        for bucket in self.storage.buckets:
            for name, piece in bucket.pieces.items():
                gradient = bucket.weights[name].grad
                piece.grad = None if gradient is None else bucket.piece_of(name, gradient)
        return norms
