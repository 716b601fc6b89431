"""A trial of one step: its phases are played without updates."""

import dis
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count, pairwise
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gan import noise
from gan.files.errors import UserError
from gan.module import GanModule
from gan.noise import OF_SEED
from gan.phase import Phase
from strategies import private
from strategies.batches import random_state
from strategies.batches.draws import ByPhase, Draws
from strategies.batches.reachable import Reachable, Scope, content_of, copied, differs, kind_of
from strategies.check.first_difference import Begin
from strategies.check.iterators import StandIn, fixed, take_places
from strategies.check.left_behind import LeftBehind
from strategies.check.one_process import as_one_process
from strategies.checkpoint.first_weights import refuse_views_of_gathered
from strategies.hooks import NO_HOOKS
from strategies.observers import Casts
from strategies.policies.policy import Policy
from strategies.private import default_store
from strategies.sharding.bucket import UNSHARDED
from strategies.turn import Training, asking, finish, gradients, ready
from strategies.world import World, agree


class Snapshot:
    """Weights, buffers, random states, and all objects that a loss can reach. See [Note: what a loss can reach].

    A trial plays with the objects themselves, not with copies: so two names of one object stay two names of it.
    """

    def __init__(self, game: GanModule, policies: Mapping[str, Policy]) -> None:
        since = time.monotonic()
        reachable = Reachable([game])
        self.iterators = reachable.iterators()
        elsewhere = not all(policy.runs_everywhere for policy in policies.values())  # one rank alone may ask
        held = fixed(self.iterators, reachable.objects.values())
        self.untried = [name for name, _ in (self.iterators if elsewhere else held)]  # with these nothing is tried
        functions = [value for _, value in reachable.objects.values() if isinstance(value, FunctionType)]
        if time.monotonic() - since > SLOW:
            packages = Counter((each.__module__ or "").partition(".")[0] for each in functions)
            _say_slow(max(packages, key=packages.__getitem__), *reachable.authors)
        self.read = {name for function in functions for name in _reads(function.__code__)}
        self.game, self.trainer = game, game.trainer
        self.should_stop, self.loggers = game.trainer.should_stop, game.trainer.loggers
        if OF_TRAINER & self.read:  # a loss may keep something there
            reachable = Reachable([game, *private.callbacks(game.trainer), private.datamodule(game.trainer)])
        self.buffers = dict(game.named_buffers())
        self.names = {buffer: f"buffer '{name}'" for name, buffer in self.buffers.items()}
        self.names |= {weight: f"weight '{name}'" for name, weight in game.named_parameters()}
        stored = [tensor for policy in policies.values() for tensor in policy.storage.tensors()]
        tensors = [each for each in dict.fromkeys([*self.names, *stored]) if content_of(each) is not None]
        self.values = {tensor: copied(tensor) for tensor in tensors}
        updaters = [each for policy in policies.values() for each in policy.updaters.values()]
        groups = [group for each in updaters for group in each.optimizer.param_groups]
        of_players = [part for each in updaters for part in (each.optimizer, each.schedule)]
        known, objects = set(map(id, [*tensors, *of_players])), reachable.objects.values()
        kinds = [(name, content_of(value), value) for name, value in objects if id(value) not in known]
        kinds += [("a group of an optimizer", kind_of(each), each) for each in groups]
        if data := private.datamodule(game.trainer):  # its own hooks of a batch may count; not the data set's contents
            kinds.append(("datamodule", content_of(scope := Scope(data)), scope))
        self.contents = [(name, kind, value, kind.read(value)) for name, kind, value in kinds if kind is not None]
        self.random = random_state.capture()

    def take_places(self) -> list[StandIn]:
        """Put something else in the place of all iterators, until everything is put back."""
        return take_places(self.iterators, self.contents)

    def written(self) -> dict[str, Tensor]:
        """The buffers and weights that have changed since, or were replaced, by their names."""
        now: dict[Tensor, Tensor] = {}  # what stands in place of a buffer
        for name, buffer in self.game.named_buffers():
            before = self.buffers.get(name, buffer)
            now |= {before: buffer} if (before.shape, before.dtype) == (buffer.shape, buffer.dtype) else {}
        changed = [tensor for tensor, value in self.values.items() if differs(now.get(tensor, tensor), value)]
        names = {tensor: self.names.get(tensor, "a shard of the weights") for tensor in changed}
        return {name: now.get(tensor, tensor).detach().clone() for tensor, name in names.items()}

    def kept(self) -> dict[str, Tensor]:
        """The new numbers in attributes, lists and tensors that the author's code reads, and arrays, by their names."""
        found: dict[str, Any] = {}
        for name, kind, value, before in self.contents:
            if isinstance(before, dict | list):
                both = before, kind.read(value)
                old, new = (each if isinstance(each, dict) else dict(enumerate(each)) for each in both)
                found |= {f"{name}.{key}".lstrip("."): each for key, each in new.items() if each is not old.get(key)}
            elif differs(value, before) if isinstance(value, Tensor) else isinstance(value, np.ndarray):
                found[name] = value
        # The last name in the path of an object that is no number of an item.
        last = {name: next((each for each in name.split(".")[::-1] if not each.isdigit()), "") for name in found}
        numbers = {name: _numbers(value) for name, value in found.items() if last[name] in self.read}
        return {name: each for name, each in numbers.items() if each is not None}

    def put_back(self) -> None:
        """Make everything as it was. What is as it was already is not touched."""
        for _, kind, value, before in self.contents:
            kind.fill(value, before)
        for tensor, before in self.values.items():
            kind_of(tensor).fill(tensor, before)
        self.trainer.should_stop, self.trainer.loggers = self.should_stop, self.loggers
        random_state.restore(self.random)


@cache
def _say_slow(package: str, *authors: str) -> None:
    if package not in authors:
        rank_zero_warn(
            f"each trial of a step looks through all objects of your code, which takes seconds; most are of "
            f"'{package}'. If that is not your own code, install it without -e: installed packages are left out"
        )


SLOW = 3.0  # seconds
OF_TRAINER = {"callbacks", "datamodule"}
APPENDS = {"append", "appendleft", "extend", "add"}  # a log is only written


def _numbers(value: Any) -> Tensor | None:
    """A copy of a number, tensor or array; None for other objects."""
    if isinstance(value, int | float | np.number):
        return torch.tensor(float(value), dtype=torch.float64)
    if content_of(value) is None or not isinstance(value, Tensor | np.ndarray) or value.dtype is np.dtype(object):
        return None
    return torch.as_tensor(value).detach().as_subclass(Tensor).to("cpu", torch.float64, copy=True)


@cache
def _reads(code: CodeType) -> frozenset[str]:
    """The names of attributes, globals and cells from which a function takes values."""
    loads = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL")
    orders = [(order, then) for order, then in pairwise(dis.get_instructions(code)) if order.opname.startswith(loads)]
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    own = frozenset(str(order.argval) for order, then in orders if then.argval not in APPENDS)
    return own.union(*map(_reads, inner))


def read_by_losses(game: GanModule) -> set[str]:
    """The names that the losses read, and those methods of the game that they call."""
    found, pending = set[str](), [getattr(phase.loss, "__func__", phase.loss) for phase in game.phases]
    while pending:
        code = getattr(pending.pop(), "__code__", None)
        names = frozenset() if code is None else _reads(code) - found
        pending += [getattr(type(game), name, None) for name in names]
        found |= names
    return found


TIMES = 10  # a phase is played so often from trial to trial
FAILS = "cannot play: "  # what a rank whose loss fails tells the others


class RanksDiffer(UserError):
    """The ranks together would not train as one device does. Every rank raises this together."""

    agreed = True


class TrialSchedule:
    """Decides when phases are tried: before they are played for the first time, and again at growing distances.

    A phase is tried when it has been played 0, 1, 3, 10, 30, 100, 300, ... times; with `often`, at least each tenth
    time. One with a `when` is tried after a step that has played it, because before it nobody knows.
    """

    def __init__(self, phases: Iterable[Phase] = (), often: bool = False) -> None:
        self.often = often
        self.times = {phase.name: 0 for phase in phases}  # how often each was due
        self.next = dict.fromkeys(self.times, 0)  # how often it will have been when it is tried again
        self.played: set[str] = set()
        self.asked: list[str] = []  # those with a `when` that this step has played

    def before(self, phases: Iterable[Phase], step: int) -> bool:
        """Whether there is a trial before this step. It counts as done then."""
        return self._due([each.name for each in phases if each.name in self.times and each.due(step, lambda _: False)])

    def after(self) -> bool:
        """Whether there is one after this step, because it has played a phase with a `when`."""
        names, self.asked = self.asked, []
        return self._due(names)

    def _due(self, names: Collection[str]) -> bool:
        due = any(self.times[name] >= self.next[name] for name in names)
        for name in names:
            if due:
                self.tried(name)
            self.times[name] += 1
        return due

    def tried(self, name: str) -> None:
        """A trial plays a phase: the next one is later."""
        times = self.times[name]
        later = next(each for power in count() for each in (10**power, 3 * 10**power) if each > times)
        self.next[name] = min(later, times + TIMES) if self.often else later


@dataclass
class Trial:
    """Plays the phases of a step without an update, and has what they gave on this rank.

    `step` is the step that is tried. `alone`: as one device does, with the samples of all ranks. `scale`: the loss is
    multiplied by so much, and the gradients are divided. `coarse` are the phases that are played in the run's
    precision, all others in full. `left` is what phases leave for others. `watched`: note in which types phases
    compute. `key` is the same on all ranks, and no other trial's.
    """

    world: World
    step: int
    key: str
    left: LeftBehind
    alone: bool = False
    scale: float = 1.0
    coarse: Collection[str] = ()
    watched: bool = False
    phase: str = ""  # that is played now, or was last
    losses: dict[tuple[str, str], float] = field(default_factory=dict)  # by phase and name
    norms: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)  # of gradients, by phase and player
    state: dict[str, Tensor] = field(default_factory=dict)  # buffers, and weights that were written
    kept: dict[str, Tensor] = field(default_factory=dict)  # in the author's objects: see Snapshot.kept
    own: list[str] = field(default_factory=list)  # of these: what differs from one device
    begins: list[Begin] = field(default_factory=list)  # where each phase begins to differ
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
                stack.enter_context(as_one_process(self.left.game.trainer, self.collectives.add))
            stack.enter_context(without_tf32())
            if self.watched:
                stack.enter_context(Casts(dtypes))
            stack.enter_context(ready(phase, policies, trying=True))
            with self.left.during(phase, batch):
                losses = gradients(phase, batch, self.step, training, self.scale)
            drew = random_state.changed(before)
            if UNSHARDED and not self.alone:
                refuse_views_of_gathered(self.left.game)
            learners = [policies[name] for name in phase.learners]
            for learner, (norms, _) in zip(learners, finish(phase, policies, self.scale), strict=True):
                self.norms[phase.name, learner.player.name] = norms_by_name(learner, norms)
            if phase.update is not None:
                with noise.at(asking(training.seed, self.step, phase, "update")):
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


def coarse_from_the_start(phases: Iterable[Phase], training: Training) -> set[str]:
    """The phases that are tried in the run's precision at once: all, if that is not mixed precision, which rounds.

    Others are so only if their loss fails in full precision, as weights of another type than their input may let it.
    But where that is on the rank of a stage or of a served player alone, the others would wait for it.
    """
    modules = [policy.player.module for policy in training.policies.values()]
    tensors = [each for module in modules for each in (*module.parameters(), *module.buffers())]
    halves = any(each.dtype in (torch.bfloat16, torch.float16) for each in tensors)
    elsewhere = not all(policy.runs_everywhere for policy in training.policies.values())
    full = isinstance(training.precision, MixedPrecision) and not (halves and elsewhere)
    return set() if full else {phase.name for phase in phases}
