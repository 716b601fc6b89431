"""What happens in a phase, in order, without its values: which weights are read, and how much memory lives."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from strategies.observers import Count

# What may happen, and what `what` is then.
BEGIN = "begin"  # of the phase
ENTER = "enter"  # a module's forward begins: the module
LEAVE = "leave"  # the innermost forward ends: its module
READ = "read"  # weights are read: a tuple of their ids
BACKWARD = "backward"  # a backward begins: whether it is the phase's last one
NEED = "need"  # the backward needs a weight: its id
GRADIENT = "gradient"  # backward has added up the gradient of a weight: its id
AGAIN = "again"  # backward computes the forward of a block again: the name of its player
FINISH = "finish"  # the rest of the reduction of a learner: its name
UPDATE = "update"  # a learner's step: its name
DROP = "drop"  # of a learner's gradients: its name
END = "end"  # of the phase


@dataclass
class Event:
    """`alive` bytes of activations live when it happens, and `highest` is the most of them until the next event.

    `at`: the moment in which it happens; operations and events are counted. `there`: the same as `alive` and `highest`
    on ranks that serve players, for the calls of one rank, by the numbers of those ranks.
    `passed`: the bytes of the tensors that a forward gets or returns; `learns`: a gradient comes back to them.
    """

    kind: str
    what: Any
    alive: int
    highest: int
    at: int = 0
    there: dict[str, Count] = field(default_factory=dict)
    passed: int = 0
    learns: bool = False


@dataclass
class Asked:
    """Bytes of the tensors that go to other ranks, and of those that come back."""

    sent: int = 0
    returned: int = 0


@dataclass
class Trace:
    """A phase as it was played once. Activations are all memory but weights, their gradients and optimizers' states.

    `reduced`: bytes that the game itself sums over all ranks, in losses and in synchronised batch norms. `asked`: what
    goes to the ranks that serve a player and comes back, by player. `resting`: the most bytes of activations that live
    on ranks that serve between two calls of a rank, for its backward. `lives`: of each piece of memory made here the
    moments in which it is made and freed, its bytes, and the id of the weight if it is a gradient of one. `uses`: after
    which events forwards use it, by the id of its row in `lives`.
    """

    phase: str
    every: int = 1
    events: list[Event] = field(default_factory=list)
    reduced: int = 0
    asked: dict[str, Asked] = field(default_factory=dict)
    resting: dict[str, int] = field(default_factory=dict)
    lives: list[list[int]] = field(default_factory=list)
    uses: set[tuple[int, int]] = field(default_factory=set)

    @cached_property
    def activations(self) -> np.ndarray:
        """When the events happen, and then the most of each until the next one."""
        return np.array([*(e.alive for e in self.events), *(e.highest for e in self.events)], dtype=float)
