"""A trial of one step: its phases are played without updates."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor

from gan import ranks
from gan.errors import UserError
from gan.phase import Phase
from strategies import random_state
from strategies.check.draws import DrawsOfSamples
from strategies.hooks import NO_HOOKS
from strategies.policies.policy import Policy
from strategies.turn import PhaseContext, gradients

TIMES = 10  # a phase is played so often from trial to trial


class Different(UserError):
    """The ranks together would not train as one device does. Every rank raises this together."""

    agreed = True


@dataclass
class Tried:
    """What a trial of one step gave on this rank."""

    losses: dict[tuple[str, str], float] = field(default_factory=dict)  # by phase and name
    norms: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)  # of gradients, by phase and player
    state: dict[str, Tensor] = field(default_factory=dict)  # buffers, and weights that were written
    drawn: dict[str, str] = field(default_factory=dict)  # by phase, its first draw from torch's own generators
    unlike: set[str] = field(default_factory=set)  # phases with other draws, which cannot be compared


class Trials:
    """Decides when phases are tried: each before it is played for the first time.

    A phase with a `when` is tried before its second time, because its loss may not be ready before the first. With
    `often` a step is tried again when one of its phases has been played TIMES times since it was tried.
    """

    def __init__(self, phases: Iterable[Phase] = (), often: bool = False) -> None:
        """`phases` are those to be tried."""
        self.untried = {phase.name for phase in phases}
        self.often, self.since = often, dict.fromkeys(self.untried, 0)  # how often each was due since its trial
        self.played: set[str] = set()

    def ready(self, phase: Phase) -> bool:
        """Whether a phase with a `when` is played in a trial."""
        return phase.name in self.played

    def due(self, phases: Iterable[Phase], step: int) -> bool:
        """Whether there is a trial before this step. It counts as done then."""
        if not (self.untried or (self.often and self.since)):
            return False
        names = {phase.name for phase in phases if phase.due(step, self.ready)}
        self.since |= {name: self.since[name] + 1 for name in names}
        due = bool(self.untried & names) or (self.often and any(self.since[name] > TIMES for name in names))
        if due:
            self.untried -= names
            self.since |= dict.fromkeys(names, 1)
        return due


class Trial:
    """Plays the phases of a step without an update, and notes what they give.

    `gather` returns the values of all ranks. `step` is the step that is tried. `alone`: as one device does, with the
    samples of all ranks. `exchanging`: draws from torch's own generators are exchanged for those of draws.py, which
    costs time with each operation.
    """

    def __init__(
        self, gather: Callable[[Any], list[Any]], step: int = 0, alone: bool = False, exchanging: bool = False
    ) -> None:
        self.gather, self.step, self.alone, self.exchanging, self.tried = gather, step, alone, exchanging, Tried()

    def play(self, phase: Phase, batch: Any, context: PhaseContext) -> None:
        """What `turn.play` does, but without the update, without torch.compile and in full precision."""
        self.meet(f"plays phase '{phase.name}'")
        context = replace(context, precision=_exact(context), hooks=NO_HOOKS)
        if any(policy.compiled for policy in context.policies.values()):
            phase = replace(phase, second_order=True)  # then all play eagerly: nothing is compiled for a few samples
        before = random_state.capture()
        with ExitStack() as held:
            if self.alone:
                context = replace(context, number=0, size=1)
                held.enter_context(ranks.alone())
            draws = DrawsOfSamples(phase.name)
            if self.exchanging:
                held.enter_context(draws)
            losses = held.enter_context(gradients(phase, batch, context))
            learners = [context.policies[name] for name in phase.learners]
            for learner in context.ranks.once(learners, f"the trial of phase '{phase.name}'"):
                self.tried.norms[phase.name, learner.player.name] = norms_by_name(learner, learner.finish(1.0))
                learner.drop_gradients()
        self.tried.losses |= {(phase.name, name): loss.item() for name, loss in losses.items()}
        if draws.drawn:
            self.tried.drawn[phase.name] = draws.drawn[0]
        if not random_state.equal(before, random_state.capture()):
            self.tried.unlike.add(phase.name)

    def meet(self, what: str) -> None:
        """Raise if another rank does something else now. In training the ranks would wait for each other."""
        everyone = self.gather(what)
        if len(set(everyone)) > 1:
            parts = "; ".join(f"rank {rank} {each}" for rank, each in enumerate(everyone))
            raise Different(
                f"in step {self.step} the ranks go different ways: {parts}. Which phases are due must not depend on a "
                f"rank's own samples; decide by what all ranks know, e.g. Phase(every=...) or gan.ranks.mean(...)"
            )


def norms_by_name(learner: Policy, norms: Tensor) -> dict[str, float]:
    """The norms of a learner's gradients, as `finish` returns them, by the weights' names."""
    names = list(learner.weights)
    if len(names) != len(norms):
        names = [name for name, weight in learner.weights.items() if weight.grad is not None]
    return dict(zip(names, norms.tolist(), strict=True))


def _exact(context: PhaseContext) -> Precision:
    """Mixed precision is left out, because it rounds; but weights in bfloat16 (the option bf16) need it."""
    mixed = isinstance(context.precision, MixedPrecision)
    halves = any("bf16" in policy.options for policy in context.policies.values())
    return Precision() if mixed and not halves else context.precision
