"""A pipeline, played dry: what a rank holds of its stages, and what goes from stage to stage."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import nn

from gan.phase import Phase
from strategies.amounts import Group, bubble, size
from strategies.cost import trace as kinds
from strategies.cost.dry import Curve, Dry, NoOptimizer
from strategies.cost.trace import Event, Trace
from strategies.policies.pipeline import Pipeline


class Stages(Dry):
    """The gradients of a rank's own weights, and what goes from stage to stage and from rank to rank.

    A rank keeps the activations of its own stages, for the samples of all ranks of its pipeline. The rank that holds
    most is planned. What goes around the chain of stages is counted as if it came from the stage before: skips over
    several stages cost a little more.
    """

    def __init__(self, policy: Pipeline, phases: Sequence[Phase]) -> None:
        super().__init__(policy, phases)
        ranks, stages = policy.shape
        self.bubble = bubble(ranks, policy.options.get("chunks") or 2 * ranks, stages // ranks)
        self.pipe, self.copies = Group(ranks), Group(policy.world.size // ranks, ranks)
        mine = {name: policy.weights[name] for name in policy.of_largest() if name in policy.weights}
        self.copy_of = {id(each): self.copy_of[id(each)] for each in mine.values()}
        self.own, self.largest = size(mine.values()), max((each.nbytes for each in mine.values()), default=0)
        self.optimizer = NoOptimizer(policy.step_bytes(self.own))
        self.networks = {network for network, _ in policy.staged}
        self.ends: set[nn.Module] = set()  # of all stages but the last
        self.rank_of = dict.fromkeys(self.networks, 0)
        for _, units in policy.staged:
            self.ends |= set(list({unit.stage: unit.module for unit in units}.values())[:-1])
            self.rank_of |= {unit.module: unit.stage % ranks for unit in units}
        self.entered: list[nn.Module] = []
        # How much less of weights, optimizer states and averages each rank holds than the one that has most weights.
        kept = policy.between_phases().bytes / max(1, policy.whole_bytes)
        self.less = [kept * (policy.whole_bytes - size(part.values())) for part in policy.parts]

    def play(self, trace: Trace) -> Curve:
        curve = super().play(trace)
        without = curve.gradients + curve.flying + trace.activations
        more = max(self.more(trace), key=lambda more: (without + more).max())
        flying = curve.flying + more
        if self.learning:
            # A chunk's gradients, beside the sums of the others and one more sum.
            flying = flying + (self.own + self.largest) * self.in_backward(trace)
        return replace(curve, flying=flying, idle=self.bubble if self.learning else 0.0)

    def in_backward(self, trace: Trace) -> np.ndarray:
        """Whether it is an event between the first backward and the end of the last one."""
        kind = [event.kind for event in trace.events]
        begin, end = kind.index(kinds.BACKWARD), kind.index(kinds.FINISH)
        return np.tile([begin <= number < end for number in range(len(kind))], 2)

    # ---- memory ----

    def more(self, trace: Trace) -> list[np.ndarray]:
        """For each rank: what it holds more than one device does, during the events and after them."""
        where, passed = self.computed(trace)
        lives = np.array(trace.lives, dtype=np.int64).reshape(-1, 3)
        lives[:, 1] = lives[:, 1].clip(max=len(where) - 1)
        rank_of = where[lives[:, 0]]
        one_device = _alive(lives[rank_of >= 0], len(where))
        found = []
        for rank, less in enumerate(self.less):
            mine = lives[rank_of == rank]
            got = []
            for at, begin, end, amount in passed[rank]:
                of_call = mine[(mine[:, 0] >= begin) & (mine[:, 0] <= end)]
                got.append((at, of_call[:, 1].max(initial=at), amount))
            got = np.array(got, dtype=np.int64).reshape(-1, 3)
            found.append(self.pipe.size * _alive(np.concatenate([mine, got]), len(where)) - one_device - less)
        return found

    def computed(self, trace: Trace) -> tuple[np.ndarray, list[list[tuple[int, int, int, int]]]]:
        """The rank that computes after each event, -1 outside of the networks; and what each rank gets for a call.

        That is inputs, what comes from the stage before, and gradients of outputs: the event, the first and the last
        one of the call, and the bytes of a rank's samples.
        """
        rank, where, inside, begun = -1, [], [], []
        got: list[tuple[int, int, int]] = []
        passed: list[list[tuple[int, int, int, int]]] = [[] for _ in self.less]
        for number, event in enumerate(trace.events):
            if event.kind == kinds.ENTER:
                inside.append(event.what)
                if event.what in self.networks:
                    begun.append(number)
                    got = [(0, number, event.passed)]
                if begun:
                    rank = self.rank_of.get(event.what, rank)
            elif event.kind == kinds.LEAVE:
                module = inside.pop()
                if module in self.ends and begun:
                    got.append(((rank + 1) % self.pipe.size, number, event.passed))
                if module in self.networks:
                    first, rank = begun.pop(), -1
                    got.append((self.pipe.size - 1, number, event.passed))
                    for to, at, amount in got:
                        passed[to].append((at, first, number, amount))
            where.append(rank)
        return np.array(where), passed

    # ---- messages ----

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
                self.passes(event, "scatter", "gather")

    def passes(self, event: Event, there: str, back: str, times: float = 1) -> None:
        """What this event has passed on, of the samples of all ranks of the pipeline; and its gradient."""
        passed = event.passed * self.pipe.size * times
        self.move(there, passed, self.pipe)
        if event.learns:
            self.move(back, passed, self.pipe)

    def finish(self) -> None:
        self.move("all-reduce", size(self.copy_of.values()), self.copies)


def _alive(lives: np.ndarray, count: int) -> np.ndarray:
    """The bytes that live at each of so many events, and then the most during each. See `Trace.lives`."""
    begin, end, amount = lives.T
    alive, during = np.zeros((2, count + 1))
    for changes, first in ((alive, np.minimum(begin + 1, end + 1)), (during, begin)):
        np.add.at(changes, first, amount)
        np.add.at(changes, end + 1, -amount)
    return np.concatenate([alive[:-1].cumsum(), during[:-1].cumsum()])
