"""zero2: the whole player on every rank; its gradients, optimizer state and average sharded."""

from strategies.policies.sharded import Sharded
from strategies.sharding.reduction import ReduceScatter, Reduction
from strategies.sharding.storage import Buckets


class Zero2(Sharded):
    """Each rank keeps and steps its own equal share of the gradients.

    Communication, in order: nothing in forward; in a phase's last backward one reduce-scatter for each bucket, as soon
    as it has all of its gradients; after it one number a weight for the norms, and one byte for each weight if some
    gradient is exactly zero, as in ddp; in the update one all-gather of the weights, in place. `averaged` gathers
    twice: the averages, and then the weights again.

    Held on each rank: weights whole; gradients (whole while backward makes them), optimizer state and average / ranks.

    It is written by hand, because torch reduces gradients into shards in FSDP2 only, which shards the weights between
    phases too.
    """

    name = "zero2"
    takes = Sharded.takes | {"bf16"}

    def make_reduction(self) -> Reduction:
        what = f"player '{self.player.name}' (policy '{self.name}')"
        assert isinstance(self.storage, Buckets)
        return ReduceScatter(self.storage, self.world.device, self.group, what, self.on_read)
