"""What a trial may change is kept before it, and put back after it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from gan.module import GanModule
from strategies import random_state
from strategies.policies.policy import Policy
from strategies.reachable import Reachable, content_of, copied, differs


class Kept:
    """Weights, buffers, random states, and all objects that a loss can reach. See [Note: what a loss can reach].

    A trial plays with the objects themselves, not with copies: so two names of one object stay two names of it.
    """

    def __init__(self, games: Sequence[GanModule], policies: Mapping[str, Policy]) -> None:
        reachable = Reachable(games)
        self.iterators = reachable.iterators()
        self.policies = policies
        self.names = {buffer: f"buffer '{name}'" for each in games for name, buffer in each.named_buffers()}
        self.names |= {weight: f"weight '{name}'" for each in games for name, weight in each.named_parameters()}
        storages = [policy.storage for policy in policies.values()]
        held = [tensor for each in storages for tensor in (*each.held(), *each.all_shards())]
        tensors = [each for each in dict.fromkeys([*self.names, *held]) if content_of(each) is not None]
        self.values = {tensor: copied(tensor) for tensor in tensors}
        objects = [value for _, value in reachable.objects.values()]
        known = set(map(id, tensors))
        kinds = [(content_of(value), value) for value in objects if id(value) not in known]
        self.contents = [(kind, value, kind.read(value)) for kind, value in kinds if kind is not None]
        self.random = random_state.capture()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What changes inside the `with` is put back afterwards."""
        try:
            yield
        finally:
            self.put_back()

    def written(self) -> dict[str, Tensor]:
        """The buffers and weights that have changed inside `aside`, by their names."""
        changed = [tensor for tensor, value in self.values.items() if differs(tensor, value)]
        return {self.names.get(each, "a shard of the weights"): each.detach().clone() for each in changed}

    def put_back(self) -> None:
        """Make everything as it was. What is as it was already is not touched."""
        for kind, value, before in self.contents:
            kind.fill(value, before)
        for tensor, before in self.values.items():
            content_of(tensor).fill(tensor, before)
        random_state.restore(self.random)
