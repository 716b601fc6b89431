"""A player in stages on paper."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from strategies.paper.amounts import Group
from strategies.paper.paper import Paper
from strategies.paper.sharded import Gathered, Reduced
from strategies.paper.trace import Trace


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


class Staged(Paper):
    """pipeline: the gradients of a rank's own weights, and what goes from stage to stage and from rank to rank.

    `networks` are those of the player, each with the modules that end its stages, in order. `pipe` are the ranks of a
    pipeline, `copies` those that have the same stages. Activations are those of one device: a rank computes a part of
    the network for the samples of all ranks of its pipeline.

    What goes around the chain of stages is counted as if it came from the stage before: skips over several stages cost
    a little more.
    """

    def __init__(
        self,
        name: str,
        weights: Mapping[str, nn.Parameter],
        step: float,
        networks: Mapping[nn.Module, Sequence[nn.Module]],
        pipe: Group,
        copies: Group,
    ) -> None:
        super().__init__(name, weights, step)
        self.networks, self.pipe, self.copies = networks, pipe, copies
        self.ends = {module for modules in networks.values() for module in modules[:-1]}
        self.entered: list[nn.Module] = []

    def begin(self, trace: Trace, learning: bool) -> None:
        super().begin(trace, learning)
        self.entered = []

    def enter(self, module: nn.Module) -> None:
        self.entered.append(module)
        if module in self.networks:
            self._passes("all-gather", "all-reduce")

    def leave(self) -> None:
        module = self.entered.pop()
        if module in self.ends:
            # Each rank sends to the next one only, so that in the mean over the ranks one of them sends nothing.
            self._passes("send", "send", (self.pipe.size - 1) / self.pipe.size)
        if module in self.networks:
            self._passes("all-gather", "all-gather")

    def _passes(self, there: str, back: str, times: float = 1) -> None:
        """What this event has passed on, of the samples of all ranks of the pipeline; and its gradient."""
        size = self.event.passed * self.pipe.size * times
        self.move(there, size, self.pipe)
        if self.event.learns:
            self.move(back, size, self.pipe)

    def finish(self) -> None:
        self.move("all-reduce", sum(self.sizes.values()), self.copies)
