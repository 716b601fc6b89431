"""deepspeed1, deepspeed2 and deepspeed3 on paper: nothing is reduced before the last backward has ended."""

from typing import Any

from strategies.cost.paper_sharded import Gathered, Reduced


class Engine(Reduced):
    """Whole gradients are all-reduced together, in one more copy; the weights are gathered after the update."""

    def gradient(self, weight: int) -> None:
        if weight not in self.reached:
            self.reached.add(weight)
            self.take(gradients=self.sizes[weight])

    def reduce(self) -> None:
        each = self.buckets[self.turns[len(self.flat)]]
        self.flat.append(each.whole)
        self.take(flying=each.whole)
        self.take(gradients=each.shard - sum(self.sizes[key] for key in each.ids & self.reached))
        self.move("all-reduce", each.whole, self.share)
        self.land(len(self.flat) - 1)


class PartitionedEngine(Gathered):
    """The same, where weights are sharded too: a phase gathers a player once, and reduce-scatters its gradients."""

    gradient = Engine.gradient

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, whole=True, **kwargs)

    def reduce(self) -> None:
        super().reduce()
        self.land(len(self.flat) - 1)
