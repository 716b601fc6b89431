"""A pipeline, played dry: what a rank holds of its stages, and what goes from stage to stage."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gan.phase import Phase
from strategies.cost.dry import Curve, Dry, NoOptimizer
from strategies.cost.tracing import Event, Kind, Trace
from strategies.observers import Ledger, Life
from strategies.pipelining.wires import AHEAD
from strategies.policies.amounts import Group, bubble, size_of
from strategies.policies.pipeline import Pipeline


class Stages(Dry):
    """The gradients of a rank's own weights, and what goes from stage to stage and from rank to rank.

    A rank keeps the activations of its own stages, for the samples of all ranks of its pipeline, and computes one chunk
    of them at a time. The rank that holds most is planned. What is sent is counted as if all of it came from the stage
    before: skips over several stages cost a little more.
    """

    def __init__(self, policy: Pipeline, phases: Sequence[Phase]) -> None:
        super().__init__(policy, phases)
        ranks, stages = policy.shape
        norms = any(isinstance(each, _BatchNorm) for network, _ in policy.staged for each in network.modules())
        self.chunks = 1 if norms else policy.options.get("chunks") or 2 * ranks
        self.chunk = ranks / self.chunks  # in the samples of a rank
        self.bubble = bubble(ranks, self.chunks, stages // ranks)
        self.pipe, self.copies = Group(ranks), Group(policy.world.size // ranks, ranks)
        mine = {name: policy.weights[name] for name in policy.of_largest() if name in policy.weights}
        self.copy_of = {id(each): self.copy_of[id(each)] for each in mine.values()}
        self.optimizer = NoOptimizer(policy.step_bytes(size_of(mine.values())))
        self.networks = {network for network, _ in policy.staged}
        self.ends: set[nn.Module] = set()  # of all stages but the last
        self.stage_of = dict.fromkeys(self.networks, 0)
        self.stage_of_weight: dict[int, int] = {}
        for _, units in policy.staged:
            self.ends |= set(list({unit.stage: unit.module for unit in units}.values())[:-1])
            self.stage_of |= {unit.module: unit.stage for unit in units}
            self.stage_of_weight |= {id(each): unit.stage for unit in units for each in unit.parameters.values()}
        # The gradients of each rank, by network: all of them, and the largest one.
        self.rank_of = {id(each): rank for rank, part in enumerate(policy.parts) for each in part.values()}
        self.own, self.largest = {}, {}
        for network, _ in policy.staged:
            learning = [each for each in network.parameters() if each.requires_grad]
            parts = [[each.nbytes for each in learning if self.rank_of[id(each)] == n] for n in range(ranks)]
            self.own[network] = [sum(part) for part in parts]
            self.largest[network] = [max(part, default=0) for part in parts]
        # How much less of weights, optimizer states and averages each rank holds than the one that has most weights.
        kept = policy.between_phases().bytes / max(1, policy.whole_bytes)
        self.less = [kept * (policy.whole_bytes - size_of(part.values())) for part in policy.parts]

    def play(self, trace: Trace) -> Curve:
        curve = super().play(trace)
        return replace(curve, flying=curve.flying + self.more(trace), idle=self.bubble if self.learning else 0.0)

    # ---- memory ----

    def more(self, trace: Trace) -> np.ndarray:
        """For each rank: what it holds more than one device does, during the events and after them."""
        lives = trace.lives_on()
        ledger = Ledger(trace.moments, len(self.less) + 1)
        ledger.live(ALL, lives)
        calls = sorted(self.calls(trace), key=lambda call: min(call.needs.values(), default=(0, 0)))
        for number, call in enumerate(calls):
            before = [each for each in calls[:number] if each.needs and each.network is call.network]
            later = any(each.network is call.network and each.backward == call.backward for each in calls[number + 1 :])
            # Gradients that are there beside those of this call: of other calls in this backward, and of other
            # micro-batches, to which one device has added them by then.
            summed = any(each.backward == call.backward for each in before)
            summed += not later and any(each.backward != call.backward for each in before)
            for stage in call.parts:
                self.add_forward(call, stage, ledger)
                if stage in call.needs:
                    made = [each for each in lives if not each.mark and each.is_made(*call.needs[stage])]
                    self.add_backward(call, stage, ledger, made, summed)
        for rank, less in enumerate(self.less):
            ledger.live(rank, (each for each in lives if self.rank_of.get(each.mark, rank) != rank), -1)
            ledger.hold(rank, trace.moments[0], trace.moments[-1], -less)
        levels = ledger.levels()
        return levels[RANKS] - levels[ONE_DEVICE]

    def calls(self, trace: Trace) -> Iterator["Call"]:
        first, stage, stages = None, 0, [-1] * len(trace.events)
        for number, event in enumerate(trace.events):
            if event.kind == Kind.ENTER:
                if event.what in self.networks:
                    first, stage = number, 0
                stage = self.stage_of.get(event.what, stage)
            elif event.kind == Kind.LEAVE and event.what in self.networks and first is not None:
                yield Call(trace, first, number, stages, self.stage_of_weight)
                first, stages = None, [-1] * len(trace.events)
            if first is not None:
                stages[number] = stage

    def add_forward(self, call: "Call", stage: int, ledger: Ledger) -> None:
        """What a rank has of one of its stages, for all chunks and for the one that it computes."""
        rank, samples, chunk = stage % self.pipe.size, self.pipe.size, self.chunk
        (start, stop), learns = call.parts[stage], stage in call.needs
        _, finish = call.needs.get(stage, (call.last, call.last))
        if stage == 0:
            ledger.hold(RANKS, call.first, call.last, samples * call.inputs.passed)  # all ranks gather the inputs
            ledger.hold(rank, call.last + 1, finish, samples * call.inputs.passed)

        # What it makes is there as long as on one device. What it sends is kept, whoever needs it.
        for life in call.inner[stage]:
            end = max(life.end, finish) if life in call.sent[stage] else life.end
            ledger.hold(rank, life.begin, end, chunk * life.bytes)
            if end > stop:
                ledger.hold(rank, start, finish if end > call.last else end, (samples - chunk) * life.bytes)
        ledger.live(RANKS, call.inner[stage], -1)

        others = [sent for source, sent in call.sent.items() if (source - stage) % samples]
        received = sum(life.bytes for sent in others for life, targets in sent.items() if stage in targets)
        ledger.hold(rank, start, finish if learns else stop, (samples if learns else chunk) * received)
        returned = samples * total(call.outputs[stage])  # the chunks, and one piece of memory to deal them out
        ledger.hold(rank, start, finish, returned)
        ledger.hold(rank, call.last, call.last, returned)

    def add_backward(self, call: "Call", stage: int, ledger: Ledger, made: Sequence[Life], summed: int) -> None:
        """The same of its backward. Its first chunk needs most: those of the others are still there."""
        rank, samples, chunk = stage % self.pipe.size, self.pipe.size, self.chunk
        start, finish = call.needs[stage]
        returned = samples * total(call.outputs[stage])  # their gradients come in parts, which are joined
        ledger.hold(rank, start, start, returned)
        ahead = min(self.chunks - 1, AHEAD / max(1, len(call.sent[stage])))  # chunks
        ledger.hold(rank, start, finish, returned + (1 + ahead) * chunk * total(call.sent[stage]))
        if stage == 0 and call.inputs.learns:
            ledger.hold(RANKS, min(begin for begin, _ in call.needs.values()), finish, samples * call.inputs.passed)
        ledger.live(rank, made, chunk)
        ledger.live(RANKS, made, -1)
        if self.learning:
            # The second chunk has its gradients beside those of the first one, which no longer needs what it kept.
            own, largest = self.own[call.network][rank], self.largest[call.network][rank]
            several = self.chunks > 1
            ledger.hold(rank, start, finish, several * max(0, own - chunk * total(call.saved[stage])))
            ledger.hold(rank, finish, finish, several * largest + summed * own)

    # ---- messages ----

    def read_or_call(self, event: Event) -> None:
        if event.kind == Kind.ENTER:
            if event.what in self.networks:
                self.passes(event, "all-gather", "all-reduce")
        elif event.kind == Kind.LEAVE:
            if event.what in self.ends:
                # Each rank sends to the next one only, so that in the mean over the ranks one of them sends nothing.
                self.passes(event, "send", "send", (self.pipe.size - 1) / self.pipe.size)
            if event.what in self.networks:
                self.passes(event, "scatter", "gather")

    def passes(self, event: Event, there: str, back: str, times: float = 1) -> None:
        """What this event has passed on, of the samples of all ranks of the pipeline; and its gradient."""
        passed = event.passed * self.pipe.size * times
        self.move(there, passed, self.pipe)
        if event.learns:
            self.move(back, passed, self.pipe)

    def finish(self) -> None:
        self.move("all-reduce", size_of(self.copy_of.values()), self.copies)


class Call:
    """A call of a network. `stages` has for each event the stage that computes after it, -1 outside of the call.

    Its first and last event, the parts of its stages, and their backwards are moments, as in `Life`. `weights` has the
    stages of weights, by their ids.
    """

    def __init__(self, trace: Trace, first: int, last: int, stages: Sequence[int], weights: Mapping[int, int]) -> None:
        moments, self.inputs, self.network = trace.moments, trace.events[first], trace.events[first].what
        self.first, self.last = moments[first], moments[last]
        events = {stage: [n for n, each in enumerate(stages) if each == stage] for stage in sorted({*stages} - {-1})}
        self.parts = {stage: (moments[at[0]], moments[at[-1] + 1] - 1) for stage, at in events.items()}
        kind = [event.kind for event in trace.events]
        self.backward = kind.index(Kind.BACKWARD, last) if Kind.BACKWARD in kind[last:] else len(kind) - 1

        # What each stage makes: what the network returns, and the rest. What goes from it to other stages, and which.
        self.outputs: dict[int, list[Life]] = {stage: [] for stage in self.parts}
        self.inner: dict[int, list[Life]] = {stage: [] for stage in self.parts}
        self.sent: dict[int, dict[Life, set[int]]] = {stage: {} for stage in self.parts}
        for life in trace.lives_on():
            if not life.mark and life.is_made(self.first, self.last):
                stage, uses = stages[bisect_left(moments, life.begin) - 1], trace.uses.get(life, ())
                (self.outputs if max(uses, default=0) >= last else self.inner)[stage].append(life)
                if to := {stages[event] for event in uses if first <= event <= last} - {stage}:
                    self.sent[stage][life] = to
        later = moments[self.backward]
        self.saved = {stage: [life for life in lives if life.end >= later] for stage, lives in self.inner.items()}
        self.needs = self._needs(trace, weights)

    def _needs(self, trace: Trace, weights: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """The backwards of the stages that have one: the first moment and the last one. The later stages come first."""
        needs: dict[int, tuple[int, int]] = {}
        moments = trace.moments
        made = [*(life.begin for life in trace.lives_on()), moments[-1]]  # in order
        ends = [min(life.end, moments[-1]) for lives in self.saved.values() for life in lives]
        if not ends:
            return needs
        start = max(each for each in moments if each <= min(ends))
        others = (each.at for each in trace.events if each.kind == Kind.NEED and each.at > max(ends))
        until = min(others, default=moments[-1])  # another call's
        for stage in reversed(self.parts):
            if self.saved[stage]:
                own = [each for each in trace.events if start <= each.at < until and weights.get(each.what) == stage]
                finish = max(min(life.end, moments[-1]) for life in self.saved[stage])
                finish = max(finish, *(each.at for each in own if each.kind == Kind.GRADIENT), 0)
                for each in own:
                    if each.kind == Kind.NEED:  # by the next operation that makes something
                        finish = max(finish, made[bisect_right(made, each.at)])
                needs[stage] = start, finish
                start = finish + 1
        return needs


def total(lives: Iterable[Life]) -> int:
    return sum(life.bytes for life in lives)


ONE_DEVICE, RANKS, ALL = -1, slice(-1), slice(None)  # rows of the ledger: the last one, and those of ranks
