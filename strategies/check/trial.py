"""A trial of one step: its phases are played without updates."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gan.files.errors import UserError
from gan.noise import OF_SEED
from gan.phase import Phase
from strategies.batches import random_state
from strategies.batches.draws import ByPhase, Draws, for_all_ranks
from strategies.check.first_difference import Begin
from strategies.check.left_behind import LeftBehind
from strategies.check.one_process import as_one_process
from strategies.checkpoint.first_weights import refuse_views_of_gathered
from strategies.hooks import NO_HOOKS
from strategies.observers import Casts
from strategies.policies.policy import Policy
from strategies.private import default_store
from strategies.sharding.bucket import UNSHARDED
from strategies.turn import Training, finish, gradients, ready
from strategies.world import World, agree

FAILS = "cannot play: "  # what a rank whose loss fails tells the others


class RanksDiffer(UserError):
    """The ranks together would not train as one device does. Every rank raises this together."""

    agreed = True


@dataclass
class Trial:
    """Plays the phases of a step without an update, and has what they gave on this rank."""

    world: World
    step: int  # that is tried
    key: str  # the same on all ranks, and no other trial's
    left: LeftBehind  # what phases leave for others
    alone: bool = False  # as one device does, with the samples of all ranks
    scale: float = 1.0  # the loss is multiplied by so much, and the gradients are divided
    coarse: Collection[str] = ()  # phases that are played in the run's precision, all others in full
    watched: bool = False  # note in which types phases compute
    phase: str = ""  # that is played now, or was last
    losses: dict[tuple[str, str], float] = field(default_factory=dict)  # by phase and name
    norms: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)  # of gradients, by phase and player
    state: dict[str, Tensor] = field(default_factory=dict)  # buffers, and weights that were written
    remembered: dict[str, Tensor] = field(default_factory=dict)  # in the author's objects: see the Snapshot
    differing: list[str] = field(default_factory=list)  # of these: what differs from one device
    begins: list[Begin] = field(default_factory=list)  # where each phase begins to differ
    unrepeated: set[str] = field(default_factory=set)  # phases that gave other losses in a second such trial
    drawn: ByPhase = field(default_factory=dict)  # by networks
    drawn_alike: bool = False  # whether the step has drawn from NumPy or Python
    dtypes: defaultdict[str, set[torch.dtype]] = field(default_factory=lambda: defaultdict(set))  # by phase
    collectives: set[str] = field(default_factory=set)  # where the author's code calls torch.distributed
    unlike: set[str] = field(default_factory=set)  # phases with draws that differ by rank, which cannot be compared
    met: int = 0  # how often the ranks have met

    @property
    def numbers(self) -> dict[tuple[str, ...], float]:
        """All losses and norms, under names of their own."""
        norms: dict[tuple[str, ...], float] = {
            ("gradient", *key, weight): norm for key, each in self.norms.items() for weight, norm in each.items()
        }
        return norms | {("loss", *key): loss for key, loss in self.losses.items()}

    def play(self, phase: Phase, batch: Any, training: Training) -> None:
        """What `turn.play` does, but without the update and without torch.compile."""
        self.meet(f"plays phase '{phase.name}'")
        policies, draws = training.policies, Draws(training.draws.known)
        precision = training.precision if phase.name in self.coarse else Precision()
        training = replace(training, precision=precision, hooks=NO_HOOKS, draws=draws, checked=False)
        self.phase, dtypes = phase.name, self.dtypes[phase.name]
        if any(policy.compiled for policy in policies.values()):
            phase = replace(phase, second_order=True)  # then all play eagerly: nothing is compiled for a few samples
        before, seed = random_state.capture(), torch.initial_seed()
        with ExitStack() as stack:
            if self.alone:
                training = replace(training, world=replace(training.world, size=1, rank=0))
                stack.enter_context(as_one_process(training.game.trainer, self.collectives.add))
            stack.enter_context(without_tf32())
            if self.watched:
                stack.enter_context(Casts(dtypes))
            stack.enter_context(ready(phase, policies, trying=True))
            with self.left.during(phase, batch):
                losses = gradients(phase, batch, self.step, training, self.scale)
            drew = random_state.changed(before)
            if UNSHARDED and not self.alone:
                refuse_views_of_gathered(training.game)
            learners = [policies[name] for name in phase.learners]
            for learner, (norms, _) in zip(learners, finish(phase, policies, self.scale), strict=True):
                self.norms[phase.name, learner.player.name] = norms_by_name(learner, norms)
            if phase.update is not None:
                with for_all_ranks(training.seed, self.step, phase.name, "update"):
                    # It may read what on_before_optimizer_step keeps, and that is not called here.
                    self.answer(phase, "update", phase.update, may_fail=True)
            for learner in learners:
                learner.reduction.drop()
        self.losses |= {(phase.name, name): loss.item() for name, loss in losses.items()}
        dtypes |= {loss.dtype for loss in losses.values()}  # an author may cast by autocast
        dtypes |= {weight.dtype for learner in learners for weight in learner.requiring_grad.values()}
        if isinstance(precision, MixedPrecision):
            dtypes.add(torch.bfloat16)  # it rounds as this or float16 do
        self.drawn |= draws.seen
        by_seed = torch.initial_seed() != seed or any(call >= OF_SEED for call in draws.seen[phase.name])
        if drew and not by_seed:  # a seed of the author's is the same on all ranks
            self.unlike.add(phase.name)

    def answer(self, phase: Phase, word: str, question: Callable[[], bool], may_fail: bool = False) -> bool:
        """What a phase's `when` or `update` says on the first rank. Warns if others say something else.

        With `may_fail` an error of the question is no answer, and nothing is compared.
        """
        self.meet(f"asks for '{word}' of phase '{phase.name}'")
        own: bool | None = None
        failing = suppress(Exception) if may_fail else nullcontext()
        with failing, as_one_process(self.left.game.trainer) if self.alone else nullcontext():
            own = bool(question())
        said = self.world.gather(own)
        first = bool(said[0])
        if {True, False}.issubset(said) and not self.alone:  # alone, a hook may have kept other samples
            rank_zero_warn(
                f"phase '{phase.name}': in step {self.step} its `{word}` is {first} on the first rank, which decides, "
                f"and {not first} on others; let it read what is the same on all ranks, such as gan.ranks.mean(x)"
            )
        return first

    def meet(self, what: str, patience: float | None = None) -> bool:
        """Raise if another rank does something else now. In training the ranks would wait for each other.

        False if some rank has not come within `patience` seconds: a rank that has failed may be waited for elsewhere.
        """
        if self.world.size == 1:
            return True
        self.met += 1
        store, key = default_store(), f"{self.key}/{self.met}"
        until = time.monotonic() + (patience or 0)
        store.add(key, 1)
        while patience is not None and store.add(key, 0) < self.world.size:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        alike = bool(agree(what, self.world.device))
        if self.world.rank == 0:
            store.delete_key(key)
        if not alike:
            everyone = self.world.gather(what)
            parts = "; ".join(f"rank {rank} {each}" for rank, each in enumerate(everyone))
            advice = (
                "Which phases are due must not depend on a rank's own samples; decide by what all ranks know, e.g. "
                "Phase(every=...) or gan.ranks.mean(...)"
            )
            if any(each.startswith(FAILS) for each in everyone):
                advice = (
                    "A loss must be able to run on all ranks. Under policy pipeline a layer, and a hook on it, runs on "
                    "the rank of its stage alone"
                )
            raise RanksDiffer(f"in step {self.step} the ranks go different ways: {parts}. {advice}")
        return True


@contextmanager
def without_tf32() -> Iterator[None]:
    """Inside the `with`, float32 has all its bits on GPUs. Convolutions round to 10 of them unless told otherwise.

    Torch has these settings in two forms, and refuses to read the older one where only the newer one was changed.
    """
    backends: Any = torch.backends
    parts = backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn
    parts += backends.mkldnn.matmul, backends.mkldnn.conv, backends.mkldnn.rnn
    before = [part.fp32_precision for part in parts]
    with ExitStack() as stack:
        for part, precision in zip(parts, before, strict=True):
            stack.callback(setattr, part, "fp32_precision", precision)
        with suppress(RuntimeError):
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        for of in (backends.cuda.matmul, backends.cudnn):
            with suppress(RuntimeError):
                stack.callback(setattr, of, "allow_tf32", of.allow_tf32)
        torch.set_float32_matmul_precision("highest")
        backends.cudnn.allow_tf32 = False
        for part in parts:
            part.fp32_precision = "ieee"
        yield


def norms_by_name(learner: Policy, norms: Tensor) -> dict[str, float]:
    """The norms of a learner's gradients, as `finish` returns them, by the names of the weights that have one."""
    names = list(learner.weights)
    if len(names) != len(norms):
        names = [name for name, weight in learner.weights.items() if weight.grad is not None]
    unreached = learner.reduction.unreached
    return {name: norm for name, norm in zip(names, norms.tolist(), strict=True) if name not in unreached}


def coarse_from_the_start(training: Training) -> set[str]:
    """The phases that are tried in the run's precision at once: all, if that is not mixed precision, which rounds.

    Others are so only if their loss fails in full precision, as weights of another type than their input may let it.
    But where that is on the rank of a stage or of a served player alone, the others would wait for it.
    """
    modules = [policy.player.module for policy in training.policies.values()]
    tensors = [each for module in modules for each in (*module.parameters(), *module.buffers())]
    halves = any(each.dtype in (torch.bfloat16, torch.float16) for each in tensors)
    elsewhere = not all(policy.runs_everywhere for policy in training.policies.values())
    full = isinstance(training.precision, MixedPrecision) and not (halves and elsewhere)
    return set() if full else {phase.name for phase in training.game.phases}
