"""A player in a phase on paper: its weights and gradients as bytes, and its collectives as numbers.

A policy says by such a paper what it does in a phase (`Policy.paper`). The papers get the events of a `Trace`, which
one device has recorded. Nothing is allocated and no other rank is needed, so a world of 4,096 ranks costs as much as a
world of two. (torch's fake process group would let the policies themselves run on the meta device. But they look for
gathered weights by the addresses of their memory, and meta tensors have none; torch's DDP and FSDP2 need memory too.)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from strategies.paper.amounts import Collective, Group
from strategies.paper.trace import Event, Trace


def size(tensors: Iterable[Tensor]) -> int:
    """Their bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass
class Level:
    """Bytes of a player at one moment of a phase, beside what the policy holds anyway."""

    gradients: float = 0
    flying: float = 0

    @property
    def bytes(self) -> float:
        return self.gradients + self.flying


@dataclass
class Account:
    """A player in a whole phase: the levels after each event and the highest during it, and its collectives."""

    after: list[Level] = field(default_factory=list)
    during: list[Level] = field(default_factory=list)
    moved: list[Collective] = field(default_factory=list)


class Paper:
    """One device: gradients are there from backward to update, and nothing is communicated.

    `weights` are those that learn. `kept` bytes of gradients stay between phases. `step` bytes are needed for a while
    by the optimizer. Other policies override the methods, which are called by the kinds of events: see trace.py.
    """

    def __init__(self, name: str, weights: Mapping[str, nn.Parameter], step: float = 0, kept: float = 0) -> None:
        self.name, self.weights, self.step, self.kept = name, weights, step, kept
        self.sizes = {id(weight): size([weight]) for weight in weights.values()}
        self.now = Level(kept)
        self.highest = Level(kept)
        self.moved: list[Collective] = []
        self.reached: set[int] = set()
        self.last = True  # whether the phase's last backward runs
        self.event: Event | None = None  # which happens now, with the activations of one device

    def play(self, trace: Trace) -> Account:
        """Go through a phase twice, because the first time a policy does not know the order of reads."""
        for _ in range(2):
            account = Account()
            self.now, self.moved = Level(self.kept), account.moved
            for event in trace.events:
                self.event = event
                self.highest = Level(self.now.gradients, self.now.flying)
                self._call(event, trace)
                account.during.append(self.highest)
                account.after.append(Level(self.now.gradients, self.now.flying))
        return account

    def _call(self, event: Event, trace: Trace) -> None:
        if event.kind == "begin":
            self.begin(trace, self.name in trace.learners)
        elif event.kind in ("finish", "update", "drop"):
            if event.what == self.name:
                getattr(self, event.kind)()
        elif event.kind == "gradient":
            if event.what in self.sizes:
                self.gradient(event.what)
        elif event.kind in ("leave", "again", "end"):
            getattr(self, event.kind)()
        else:
            getattr(self, event.kind)(event.what)

    def take(self, gradients: float = 0, flying: float = 0) -> None:
        """More bytes are held from now on, or, below zero, fewer."""
        self.now.gradients += gradients
        self.now.flying += flying
        if self.now.bytes > self.highest.bytes:
            self.highest = Level(self.now.gradients, self.now.flying)

    def move(self, kind: str, payload: float, group: Group) -> None:
        if payload and group.size > 1:
            self.moved.append(Collective(kind, payload, group))

    # ---- what happens in a phase ----

    def begin(self, trace: Trace, learning: bool) -> None:
        self.reached = set()

    def enter(self, module: nn.Module) -> None:
        """A forward begins."""

    def leave(self) -> None:
        """The innermost forward ends."""

    def read(self, weights: tuple[int, ...]) -> None:
        """Weights are read, of any player."""

    def backward(self, last: bool) -> None:
        self.last = last

    def need(self, weight: int) -> None:
        """Backward needs a weight, of any player."""

    def gradient(self, weight: int) -> None:
        """Backward has added up the whole gradient of one of this player's weights."""
        if weight not in self.reached:
            self.reached.add(weight)
            self.take(gradients=self.sizes[weight])

    def again(self) -> None:
        """Backward computes the forward of a block again. Its reads come next."""

    def finish(self) -> None:
        """The reduction is completed."""

    def update(self) -> None:
        """The optimizer takes its step."""
        self.take(flying=self.step)
        self.take(flying=-self.step)

    def drop(self) -> None:
        self.now.gradients = self.kept

    def end(self) -> None:
        """The phase is over."""


class Replicated(Paper):
    """ddp: the reducer's buckets of gradients stay, and are all-reduced in a phase's last backward.

    `gathered`: bytes of weights that are gathered after the update, in place (zero1).
    """

    def __init__(
        self, name: str, weights: Mapping[str, nn.Parameter], step: float, group: Group, gathered: float, share: Group
    ) -> None:
        super().__init__(name, weights, step, kept=size(weights.values()))
        self.group, self.gathered, self.share = group, gathered, share

    def gradient(self, weight: int) -> None:
        """Earlier micro-batches add up outside of the buckets."""
        if not self.last and weight not in self.reached:
            self.reached.add(weight)
            self.take(gradients=self.sizes[weight])
        elif self.last and weight in self.reached:
            self.reached.remove(weight)
            self.take(gradients=-self.sizes[weight])

    def finish(self) -> None:
        self.move("all-reduce", self.kept, self.group)

    def update(self) -> None:
        super().update()
        self.move("all-gather", self.gathered, self.share)
