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
from torch import Tensor, nn

from gan.phase import Phase
from strategies import private
from strategies.amounts import Collective, Group, size
from strategies.cost import stand_ins
from strategies.cost import trace as kinds
from strategies.cost.trace import Event, Trace
from strategies.living import Count, Living
from strategies.policies.belongings import Belongings
from strategies.policies.pipeline import Pipeline
from strategies.policies.policy import Policy
from strategies.ranks import Groups

READS_AND_CALLS = (kinds.ENTER, kinds.LEAVE, kinds.READ, kinds.NEED, kinds.AGAIN)
META = torch.device("meta")
COLLECTIVES = {"allreduce": "all-reduce", "allgather": "all-gather", "reduce_scatter": "reduce-scatter"}


@dataclass(frozen=True)
class Curve:
    """A player in a phase, as arrays over its events: `gradients` and `flying`, during an event and after it.

    Both are one array, first all during and then all after.
    """

    gradients: np.ndarray
    flying: np.ndarray
    collectives: Sequence[Collective]


class Dry:
    """Plays one player's policy. Here no weights are gathered in a phase; a subclass adds that."""

    plays = 1  # how often a phase is played
    kept = 0  # bytes of gradients that stay between phases

    def __init__(self, policy: Policy, phases: Sequence[Phase]) -> None:
        """Another policy like this one works on copies of the weights, which have no values."""
        self.phases = {phase.name: phase for phase in phases}
        own = policy.belongings.parameters
        copies = {name: nn.Parameter(_empty(each), each.requires_grad) for name, each in own.items()}
        self.copy_of = {id(each): copies[name] for name, each in own.items()}
        world = replace(policy.world, device=META, groups=Groups(phases))
        self.policy: Policy = type(policy)(policy.player, world, policy.options, Belongings(copies, ()))
        self.policy.followed = policy.followed or policy  # in buckets like these
        stand_ins.prepare(self.policy)
        self.owned = self.policy.storage.owned
        self.living = Living([*copies.values(), *self.owned.values(), *self.policy.storage.held()], self.saw_collective)
        self.gradients = Count()
        self.home = "offload" in policy.options
        self.optimizer = _Optimizer(0 if self.home else policy.step_bytes(size(self.owned.values())))
        self.collectives: list[Collective] = []
        self.learning = False
        self.held = ExitStack()  # what the policy holds around a phase

    def play(self, trace: Trace) -> Curve:
        for _ in range(self.plays):
            self.collectives, during, after = [], [], []
            with self.living, torch.no_grad(), self.held:
                for event in trace.events:
                    self.living.reset()
                    self.tell(event, trace)
                    gradients = self.gradients.alive
                    during.append((gradients, self.living.here.highest - gradients))
                    after.append((gradients, self.living.here.alive - gradients))
        gradients, flying = np.array([*during, *after], dtype=float).T
        return Curve(gradients + self.kept, flying, self.collectives)

    def saw_collective(self, name: str, args: list[Any]) -> None:
        kind = next((kind for word, kind in COLLECTIVES.items() if word in name), None)
        if kind is None:
            return
        tensors = [each for each in args if isinstance(each, Tensor)]
        if kind == "reduce-scatter":
            self.living.count_too(tensors[0], self.gradients)
        group = stand_ins.ranks_of(private.group_in(args), self.policy)
        self.move(kind, max(each.nbytes for each in tensors), group)

    def move(self, kind: str, payload: float, group: Group) -> None:
        if payload and group.size > 1:
            self.collectives.append(Collective(kind, payload, group))

    def tell(self, event: Event, trace: Trace) -> None:
        """Call the policy as training does when this happens."""
        kind, what = event.kind, event.what
        mine = what == self.policy.player.name
        if kind == kinds.BEGIN:
            self.begin(self.phases[trace.phase])
        elif kind == kinds.BACKWARD and self.learning:
            self.backward(what)
        elif kind == kinds.GRADIENT and self.learning and what in self.copy_of:
            self.gradient(self.copy_of[what])
        elif kind == kinds.FINISH and mine:
            self.finish()
        elif kind == kinds.UPDATE and mine:
            self.policy.storage.step(self.optimizer, ())
        elif kind == kinds.DROP and mine:
            self.policy.drop_gradients()
        elif kind == kinds.END:
            self.end()
        elif kind in READS_AND_CALLS:
            self.read_or_call(event)

    def begin(self, phase: Phase) -> None:
        self.learning = self.policy.player.name in phase.learners
        self.policy.begin(phase)
        self.held.enter_context(self.policy.hold(phase))

    def read_or_call(self, event: Event) -> None:
        """Weights are read, or needed by backward, of any player; or a call of a module begins or ends."""

    def backward(self, last: bool) -> None:
        """A backward begins; the last one of the phase?"""
        self.policy.arm(torch.empty((), device=META), last)

    def gradient(self, weight: nn.Parameter) -> None:
        """Backward has added up the whole gradient of a weight."""
        if weight.grad is None:
            weight.grad = _empty(weight)
            self.living.count_too(weight.grad, self.gradients)
        for hook in (weight._post_accumulate_grad_hooks or {}).values():
            hook(weight)

    def finish(self) -> None:
        self.policy.finish(1.0)
        for piece in self.owned.values() if self.home else ():
            if piece.grad is not None:
                self.living.forget(piece.grad)  # it is in the CPU's memory now

    def end(self) -> None:
        self.held.close()


class Replicated(Dry):
    """ddp and zero1: the buckets of DDP's reducer stay, and are all-reduced in a phase's last backward."""

    def __init__(self, policy: Policy, phases: Sequence[Phase]) -> None:
        super().__init__(policy, phases)
        self.kept, self.everyone = size(policy.weights.values()), Group(policy.world.size)
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
        self.move("all-reduce", self.kept, self.everyone)


class Gathered(Dry):
    """A policy that gathers weights when they are read."""

    plays = 2  # the first time a policy does not know the order of reads

    def __init__(self, policy: Policy, phases: Sequence[Phase]) -> None:
        super().__init__(policy, phases)
        self.on_read = self.policy.on_read
        self.on_read.before = {phase.name: [] for phase in phases}  # there is no other rank to agree with

    def read_or_call(self, event: Event) -> None:
        if event.kind == kinds.ENTER:
            self.on_read.enter(self.copies(id(each) for each in dict.values(event.what._parameters)))
        elif event.kind == kinds.LEAVE:
            self.on_read.leave()
        elif event.kind == kinds.READ:
            self.on_read.read(self.copies(event.what))
        elif event.kind == kinds.NEED:
            for copy in self.copies([event.what]):
                self.on_read.fetch(self.on_read.number[id(copy)])
        elif event.what == self.policy.player.name:
            self.on_read.begin_again()

    def copies(self, weights: Any) -> list[nn.Parameter]:
        return [self.copy_of[key] for key in weights if key in self.copy_of]


class Stages(Dry):
    """pipeline: the gradients of a rank's own weights, and what goes from stage to stage and from rank to rank.

    Activations are those of one device: a rank computes a part of the network for the samples of all ranks of its
    pipeline. What goes around the chain of stages is counted as if it came from the stage before: skips over several
    stages cost a little more.
    """

    def __init__(self, policy: Pipeline, phases: Sequence[Phase]) -> None:
        super().__init__(policy, phases)
        ranks, _ = policy.shape
        self.pipe, self.copies = Group(ranks), Group(policy.world.size // ranks, ranks)
        mine = {name: policy.weights[name] for name in policy.of_largest() if name in policy.weights}
        self.copy_of = {id(each): self.copy_of[id(each)] for each in mine.values()}
        self.optimizer = _Optimizer(policy.step_bytes(size(mine.values())))
        self.networks = {network for network, _ in policy.staged}
        self.ends: set[nn.Module] = set()  # of all stages but the last
        for _, units in policy.staged:
            self.ends |= set(list({unit.stage: unit.module for unit in units}.values())[:-1])
        self.entered: list[nn.Module] = []

    def read_or_call(self, event: Event) -> None:
        if event.kind == kinds.ENTER:
            self.entered.append(event.what)
            if event.what in self.networks:
                self.passes(event, "all-gather", "all-reduce")
        elif event.kind == kinds.LEAVE:
            module = self.entered.pop()
            if module in self.ends:
                # Each rank sends to the next one only, so that in the mean over the ranks one of them sends nothing.
                self.passes(event, "send", "send", (self.pipe.size - 1) / self.pipe.size)
            if module in self.networks:
                self.passes(event, "all-gather", "all-gather")

    def passes(self, event: Event, there: str, back: str, times: float = 1) -> None:
        """What this event has passed on, of the samples of all ranks of the pipeline; and its gradient."""
        passed = event.passed * self.pipe.size * times
        self.move(there, passed, self.pipe)
        if event.learns:
            self.move(back, passed, self.pipe)

    def finish(self) -> None:
        self.move("all-reduce", size(self.copy_of.values()), self.copies)


class _Optimizer:
    """It needs so many bytes for a while."""

    def __init__(self, needed: float) -> None:
        self.needed = int(needed)

    def step(self) -> None:
        torch.empty(self.needed, dtype=torch.uint8, device=META)


def _empty(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=META)
