"""A player's policy in a phase, played dry: the code that trains works on tensors without values.

A `Trace` has recorded on one device what happens in the phase. Its events are told to the storage and the reduction of
the policy, as the first rank of many, on the meta device, where collectives communicate nothing. What they allocate and
send meanwhile is counted. So a world of 4,096 ranks costs as much as a world of two.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gan.phase import Phase
from strategies import private
from strategies.cost.tracing import Event, Kind, Trace
from strategies.observers import Ledger, Living
from strategies.policies.amounts import Collective, Group, size_of
from strategies.policies.belongings import Belongings
from strategies.policies.policy import Policy
from strategies.world import Groups

META = torch.device("meta")
GRADIENT = 1  # the mark of lives
COLLECTIVES = {"allreduce": "all-reduce", "allgather": "all-gather", "reduce_scatter": "reduce-scatter"}


@dataclass(frozen=True)
class Curve:
    """A player in a phase, as arrays over its events: first what is there during each, and then after each."""

    gradients: np.ndarray
    flying: np.ndarray  # of a pipeline: an array for each of its ranks
    collectives: Sequence[Collective]
    idle: float = 0.0  # the part of the phase in which this rank waits for others that compute: a pipeline's bubble


class Dry:
    """Plays one player's policy."""

    kept_gradients = 0  # bytes of gradients that stay between phases

    def __init__(self, policy: Policy, phases: Sequence[Phase]) -> None:
        """Another policy like this one works on copies of the weights, which have no values."""
        self.phases = {phase.name: phase for phase in phases}
        own = policy.belongings.parameters
        copies = {name: nn.Parameter(torch.empty_like(p, device=META), p.requires_grad) for name, p in own.items()}
        self.copy_of = {id(each): copies[name] for name, each in own.items()}
        world = replace(policy.world, device=META, groups=Groups(phases))
        belongings = Belongings(copies, (), optimizers=policy.belongings.optimizers)
        self.policy: Policy = type(policy)(policy.player, world, policy.options, belongings)
        self.policy.followed = policy.followed or policy  # in buckets like these
        self.policy.adopt_dry()
        self.owned = self.policy.storage.owned
        self.on_read = self.policy.on_read
        if self.on_read is not None:
            self.on_read.before = {phase.name: [] for phase in phases}  # there is no other rank to agree with
        stored = self.policy.storage.tensors()
        self.living = Living([*copies.values(), *self.owned.values(), *stored], self.saw_collective)
        self.home = "offload" in policy.options
        self.optimizer = NoOptimizer(0 if self.home else policy.step_bytes(size_of(self.owned.values())))
        self.collectives: list[Collective] = []
        self.learning = False
        self.stack = ExitStack()  # around a phase

    def play(self, trace: Trace) -> Curve:
        if self.on_read is not None:  # the first time a policy does not know the order of reads
            self._play(trace)
        return self._play(trace)

    def _play(self, trace: Trace) -> Curve:
        self.collectives, moments, lives = [], [], self.living.begin()
        with self.living, torch.no_grad(), self.stack:
            for event in trace.events:
                moments.append(self.living.tick())
                self.tell(event, trace)
        ledger = Ledger([*moments, self.living.tick()], 2)
        ledger.live(0, lives)
        ledger.live(1, (life for life in lives if life.mark))
        at, highest = np.split(ledger.levels(), 2, 1)
        gradients = np.tile(at[1, 1:], 2)
        alive = np.concatenate([highest[0, :-1], at[0, 1:]])  # at most during each event, and then after each
        return Curve(gradients + self.kept_gradients, alive - gradients, self.collectives)

    def saw_collective(self, name: str, args: list[Any]) -> None:
        kind = next((kind for word, kind in COLLECTIVES.items() if word in name), None)
        if kind is None:
            return
        tensors = [each for each in args if isinstance(each, Tensor)]
        if kind == "reduce-scatter":
            self.living.life(tensors[0]).mark = GRADIENT
        self.move(kind, max(each.nbytes for each in tensors), ranks_of(private.group_in(args)))

    def move(self, kind: str, payload: float, group: Group) -> None:
        if payload and group.size > 1:
            self.collectives.append(Collective(kind, payload, group))

    def tell(self, event: Event, trace: Trace) -> None:
        """Call the policy as training does when this happens."""
        kind, what = event.kind, event.what
        mine = what == self.policy.player.name
        if kind == Kind.BEGIN:
            phase = self.phases[trace.phase]
            self.learning = self.policy.player.name in phase.learners
            self.stack.enter_context(self.policy.during(phase))
        elif kind == Kind.BACKWARD and self.learning:
            self.backward(what)
        elif kind == Kind.GRADIENT and self.learning and what in self.copy_of:
            self.gradient(self.copy_of[what])
        elif kind == Kind.FINISH and mine:
            self.finish()
        elif kind == Kind.UPDATE and mine:
            self.policy.storage.step(self.optimizer, ())
        elif kind == Kind.DROP and mine:
            self.policy.reduction.drop()
        elif kind == Kind.END:
            self.stack.close()
        else:
            self.read_or_call(event)

    def read_or_call(self, event: Event) -> None:
        """Weights are read, or needed by backward, of any player; or a call of a module begins or ends."""
        if self.on_read is None:
            return
        if event.kind == Kind.ENTER:
            self.on_read.enter(self.copied(id(each) for each in dict.values(event.what._parameters)))
        elif event.kind == Kind.LEAVE:
            self.on_read.leave()
        elif event.kind == Kind.READ:
            self.on_read.read(self.copied(event.what))
        elif event.kind == Kind.NEED:
            for copy in self.copied([event.what]):
                self.on_read.fetch(self.on_read.number[id(copy)])
        elif event.kind == Kind.AGAIN and event.what == self.policy.player.name:
            self.on_read.begin_again()

    def copied(self, weights: Any) -> list[nn.Parameter]:
        return [self.copy_of[key] for key in weights if key in self.copy_of]

    def backward(self, last: bool) -> None:
        """A backward begins; the last one of the phase?"""
        self.policy.reduction.arm(torch.empty((), device=META), last)

    def gradient(self, weight: nn.Parameter) -> None:
        """Backward has added up the whole gradient of a weight."""
        if weight.grad is None:
            weight.grad = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)  # it may be sharded
            self.living.life(weight.grad).mark = GRADIENT
        for hook in private.post_accumulate_hooks(weight):
            hook(weight)

    def finish(self) -> None:
        self.policy.reduction.finish(1.0)
        for piece in self.owned.values() if self.home else ():
            if piece.grad is not None:
                self.living.forget(piece.grad)  # it is in the CPU's memory now


class Replicated(Dry):
    """ddp and zero1: the buckets of DDP's reducer stay, and are all-reduced in a phase's last backward."""

    def __init__(self, policy: Policy, phases: Sequence[Phase]) -> None:
        super().__init__(policy, phases)
        self.kept_gradients, self.everyone = size_of(policy.weights.values()), Group(policy.world.size)
        self.last = False  # whether the phase's last backward runs

    def backward(self, last: bool) -> None:
        self.last = last

    def gradient(self, weight: nn.Parameter) -> None:
        """Earlier micro-batches add up outside of the buckets."""
        if self.last:
            weight.grad = None
        else:
            super().gradient(weight)

    def finish(self) -> None:
        self.move("all-reduce", self.kept_gradients, self.everyone)


class NoOptimizer(Optimizer):
    """It needs so many bytes for a while, and steps nothing: so it is not set up as torch's are."""

    def __init__(self, needed: float) -> None:
        self.needed = int(needed)

    def step(self, closure: None = None) -> None:
        torch.empty(self.needed, dtype=torch.uint8, device=META)


def ranks_of(group: dist.ProcessGroup) -> Group:
    first, *others = dist.get_process_group_ranks(group)
    return Group(1 + len(others), others[0] - first if others else 1)
