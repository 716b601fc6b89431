"""A pipeline, played dry: what a rank holds of its stages, and what goes from stage to stage."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gan.phase import Phase
from strategies.amounts import Group, bubble, size
from strategies.cost.dry import Curve, Dry, NoOptimizer
from strategies.cost.tracing import Event, Kind, Trace
from strategies.observers import Ledger
from strategies.pipelining.passes import AHEAD
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
        self.optimizer = NoOptimizer(policy.step_bytes(size(mine.values())))
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
        self.less = [kept * (policy.whole_bytes - size(part.values())) for part in policy.parts]

    def play(self, trace: Trace) -> Curve:
        curve = super().play(trace)
        return replace(curve, flying=curve.flying + self.more(trace), idle=self.bubble if self.learning else 0.0)

    # ---- memory ----

    def more(self, trace: Trace) -> np.ndarray:
        """For each rank: what it holds more than one device does, during the events and after them."""
        lives = Lives(trace)
        ledger = Ledger(trace.moments, len(self.less) + 1)
        ledger.hold(ALL, lives.begin, lives.end, lives.amount)
        calls = sorted(self.calls(trace, lives), key=lambda call: min(call.needs.values(), default=(0, 0)))
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
                    self.add_backward(call, stage, ledger, summed)
        for rank, less in enumerate(self.less):
            elsewhere = np.array([self.rank_of.get(each, rank) != rank for each in lives.weight], dtype=bool)
            ledger.hold(rank, lives.begin[elsewhere], lives.end[elsewhere], -lives.amount[elsewhere])
            ledger.hold(rank, lives.moments[0], lives.moments[-1], -less)
        levels = ledger.levels()
        return levels[RANKS] - levels[ONE_DEVICE]

    def calls(self, trace: Trace, lives: "Lives") -> Iterator["Call"]:
        first, stage, stages = None, 0, np.full(len(trace.events), -1)
        for number, event in enumerate(trace.events):
            if event.kind == Kind.ENTER:
                if event.what in self.networks:
                    first, stage = number, 0
                stage = self.stage_of.get(event.what, stage)
            elif event.kind == Kind.LEAVE and event.what in self.networks and first is not None:
                yield Call(trace, lives, first, number, stages, self.stage_of_weight)
                first, stages = None, np.full(len(trace.events), -1)
            if first is not None:
                stages[number] = stage

    def add_forward(self, call: "Call", stage: int, ledger: Ledger) -> None:
        """What a rank has of one of its stages, for all chunks and for the one that it computes."""
        rank, samples, chunk = stage % self.pipe.size, self.pipe.size, self.chunk
        lives, (start, stop), learns = call.lives, call.parts[stage], stage in call.needs
        _, finish = call.needs.get(stage, (call.last, call.last))
        if stage == 0:
            ledger.hold(RANKS, call.first, call.last, samples * call.inputs.passed)  # all ranks gather the inputs
            ledger.hold(rank, call.last + 1, finish, samples * call.inputs.passed)

        # What it makes is there as long as on one device. What it sends is kept, whoever needs it.
        inner = call.made(stage) & ~call.outputs
        end = np.where(call.sent, np.maximum(lives.end, finish), lives.end)
        ledger.hold(rank, lives.begin[inner], end[inner], chunk * lives.amount[inner])
        kept = inner & (end > stop)
        end = np.where(end > call.last, finish, end)
        ledger.hold(rank, start, end[kept], (samples - chunk) * lives.amount[kept])
        ledger.hold(RANKS, lives.begin[inner], lives.end[inner], -lives.amount[inner])

        received = sum(lives.amount[n] for n, to in call.passed if to == stage and (call.made_in[n] - stage) % samples)
        ledger.hold(rank, start, finish if learns else stop, (samples if learns else chunk) * received)
        returned = samples * call.of(stage, call.outputs)  # the chunks, and one piece of memory to deal them out
        ledger.hold(rank, start, finish, returned)
        ledger.hold(rank, call.last, call.last, returned)

    def add_backward(self, call: "Call", stage: int, ledger: Ledger, summed: int) -> None:
        """The same of its backward. Its first chunk needs most: those of the others are still there."""
        rank, samples, chunk = stage % self.pipe.size, self.pipe.size, self.chunk
        lives, (start, finish) = call.lives, call.needs[stage]
        returned = samples * call.of(stage, call.outputs)  # their gradients come in parts, which are joined
        ledger.hold(rank, start, start, returned)
        ahead = min(self.chunks - 1, AHEAD / max(1, (call.made(stage) & call.sent).sum()))  # chunks
        ledger.hold(rank, start, finish, returned + (1 + ahead) * chunk * call.of(stage, call.sent))
        if stage == 0 and call.inputs.learns:
            ledger.hold(RANKS, min(begin for begin, _ in call.needs.values()), finish, samples * call.inputs.passed)

        made = (lives.weight == 0) & (lives.begin >= start) & (lives.begin <= finish)
        ledger.hold(rank, lives.begin[made], lives.end[made], chunk * lives.amount[made])
        ledger.hold(RANKS, lives.begin[made], lives.end[made], -lives.amount[made])
        if self.learning:
            # The second chunk has its gradients beside those of the first one, which no longer needs what it kept.
            own, largest = self.own[call.network][rank], self.largest[call.network][rank]
            several = self.chunks > 1
            ledger.hold(rank, start, finish, several * max(0, own - chunk * call.of(stage, call.saved)))
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
        self.move("all-reduce", size(self.copy_of.values()), self.copies)


class Call:
    """A call of a network. `stages` has for each event the stage that computes after it, -1 outside of the call.

    Its first and last event, the parts of its stages, and their backwards are moments, as in `Trace.lives`. `weights`
    has the stages of weights, by their ids.
    """

    def __init__(
        self, trace: Trace, lives: "Lives", first: int, last: int, stages: np.ndarray, weights: Mapping[int, int]
    ) -> None:
        self.lives, self.inputs, self.network = lives, trace.events[first], trace.events[first].what
        self.first, self.last = lives.moments[[first, last]]
        events = {stage: np.flatnonzero(stages == stage) for stage in sorted({*map(int, stages)} - {-1})}
        self.parts = {stage: (lives.moments[at[0]], lives.moments[at[-1] + 1] - 1) for stage, at in events.items()}
        inside = (lives.begin >= self.first) & (lives.begin <= self.last) & (lives.weight == 0)
        self.made_in = np.where(inside, stages[lives.event], -1)
        self.outputs = inside & (lives.last_use >= last)
        used = {(life, int(stages[event])) for life, event in lives.uses if inside[life] and first <= event <= last}
        self.passed = {(life, to) for life, to in used if to != self.made_in[life]}
        self.sent = np.isin(np.arange(len(inside)), [life for life, _ in self.passed])
        kind = [event.kind for event in trace.events]
        self.backward = kind.index(Kind.BACKWARD, last) if Kind.BACKWARD in kind[last:] else len(kind) - 1
        self.saved = inside & (lives.end >= lives.moments[self.backward]) & ~self.outputs
        # The backwards of the stages that have one: the first moment and the last one. The later stages come first.
        self.needs: dict[int, tuple[int, int]] = {}
        ends = lives.end[self.saved]
        start = lives.moments[lives.moments <= ends.min(initial=lives.end.max())].max()
        needs = np.array([each.at for each in trace.events if each.kind == Kind.NEED])
        until = needs[needs > ends.max(initial=0)].min(initial=lives.moments[-1])  # another call's
        for stage in reversed(self.parts):
            if (self.made(stage) & self.saved).any():
                own = [each for each in trace.events if start <= each.at < until and weights.get(each.what) == stage]
                finish = lives.end[self.made(stage) & self.saved].max()
                finish = max(finish, *(each.at for each in own if each.kind == Kind.GRADIENT), 0)
                for each in own:
                    if each.kind == Kind.NEED:  # by the next operation that makes something
                        finish = max(finish, lives.begin[lives.begin > each.at].min(initial=lives.moments[-1]))
                self.needs[stage] = int(start), int(finish)
                start = finish + 1

    def made(self, stage: int) -> np.ndarray:
        """Which lives are of what this stage has made."""
        return self.made_in == stage

    def of(self, stage: int, lives: np.ndarray) -> float:
        """The bytes of what this stage has made, of these lives."""
        return self.lives.amount[self.made(stage) & lives].sum()


class Lives:
    """The lives of a trace as columns, and the moments of the events. What outlives the phase ends with it."""

    def __init__(self, trace: Trace) -> None:
        self.moments = np.array(trace.moments)
        here = [life for life in trace.lives if not life.where]
        rows = [(life.begin, life.end, life.bytes, life.mark) for life in here]
        self.begin, self.end, self.amount, self.weight = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        self.end = self.end.clip(max=self.moments[-1])
        self.event = np.searchsorted(self.moments, self.begin) - 1  # after which it is made
        number = {life: number for number, life in enumerate(here)}
        uses = [(number[life], event) for life, event in trace.uses if life in number]
        self.uses = np.array(uses, dtype=int).reshape(-1, 2)
        self.last_use = np.zeros_like(self.begin)
        np.maximum.at(self.last_use, *self.uses.T)


ONE_DEVICE, RANKS, ALL = -1, slice(-1), slice(None)  # rows of the ledger: the last one, and those of ranks
