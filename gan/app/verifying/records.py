"""What each phase of a training gave, in a few numbers a tensor; and where two trainings differ first, and in what."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from lightning import Callback, Trainer
from torch import Tensor

from gan.files.checkpoint import checksum
from gan.module import GanModule
from gan.phase import Phase
from strategies import PhaseStrategy
from strategies.batches import random_state
from strategies.batches.micro_batches import tensors
from strategies.check.comparison import gap_of, shake_weights, two_numbers
from strategies.check.trial import norms_by_name
from strategies.observers import Casts
from strategies.sharding.resharded_parameter import resharded
from strategies.strategy import phase_strategy


class Moment(NamedTuple):
    """`phase` is empty for what is of the whole step. `kind` is batch, loss, gradient, buffer, weight or average."""

    step: int
    phase: str
    kind: str
    name: str


@dataclass
class Record:
    """One rank's training. `moments` are in the order in which they happened.

    A loss is a number, a gradient its norm; of a buffer, weight or average there are two numbers (see `digest`); of a
    batch there is a number for each row.
    """

    moments: dict[Moment, tuple[float, ...]] = field(default_factory=dict)
    drew: set[str] = field(default_factory=set)  # phases that drew other numbers on each rank, from torch's generator
    last: dict[str, Tensor] = field(default_factory=dict)  # weights, buffers and averages after the last step
    elsewhere: set[str] = field(default_factory=set)  # weights of players that other ranks serve
    cast: bool = False  # whether a phase makes float32 of float64
    distances: dict[str, float] = field(default_factory=dict)  # of the last tensors from one device's, by their names
    seconds: float = 0.0


def digest(tensor: Tensor) -> tuple[float, float]:
    """The norm, and a sum in which each element has a weight of its own: moving or exchanging elements changes it."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = values.detach().reshape(-1).double()
    ramp = torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)
    return flat.norm().item(), torch.dot(flat, ramp).item()


class Recorder(Callback):
    """Records a training. `Recorded` tells it of each phase, Lightning of the rest."""

    def __init__(self, last_step: int, shaken: bool, sees_casts: bool) -> None:
        """The training stops after `last_step`. `sees_casts`: note whether float64 is cast to float32 by hand."""
        self.last_step, self.shaken, self.record = last_step, shaken, Record()
        self.watching = Casts() if sees_casts else nullcontext()
        self.step = 0
        self.norms: dict[str, float] = {}  # of the gradients in this phase

    def on_train_batch_start(self, trainer: Trainer, game: GanModule, batch: Any, batch_idx: int) -> None:
        self.step = game.step
        for number, tensor in enumerate(tensors(batch)):
            if tensor.ndim:
                self._note("", "batch", str(number), tuple(checksum(row)[1] for row in tensor))
        if self.shaken:  # see [Note: what rounding does]
            shake_weights(phase_strategy(trainer).policies.values(), self.step)

    def on_before_optimizer_step(self, trainer: Trainer, game: GanModule, optimizer: Any) -> None:
        """The learner's gradients are reduced now, and not clipped yet."""
        for name, policy in phase_strategy(trainer).policies.items():
            if policy.optimizer is optimizer:
                norms = norms_by_name(policy, policy.reduction.norms())
                self.norms |= {f"{name}.{weight}": norm for weight, norm in norms.items()}

    def after(self, phase: Phase, strategy: PhaseStrategy) -> None:
        """The phase has been played, with the updates of its learners."""
        for name, loss in strategy.steps.logged.losses.items():
            if name.startswith(f"{phase.name}/") and not name.endswith("_grad_norm"):
                self._note(phase.name, "loss", name.removeprefix(f"{phase.name}/"), (loss.item(),))
        for name, norm in self.norms.items():
            self._note(phase.name, "gradient", name, (norm,))
        self.norms = {}
        for kind, name, tensor in self._here(strategy):
            self._note(phase.name, kind, name, digest(tensor))

    def on_train_batch_end(self, trainer: Trainer, game: GanModule, *_: Any) -> None:
        """The run's own `max_steps` stays what it is for the game, so the training is stopped here."""
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.last_step
        for kind, name, average in _averages(phase_strategy(trainer)):
            self._note("", kind, name, digest(average))

    def on_train_end(self, trainer: Trainer, game: GanModule) -> None:
        strategy = phase_strategy(trainer)
        for kind, name, tensor in chain(self._here(strategy), _averages(strategy)):
            self.record.last[f"{kind} '{name}'"] = tensor.detach().cpu().clone()

    def _here(self, strategy: PhaseStrategy) -> Iterator[tuple[str, str, Tensor]]:
        """All buffers and gathered weights, by kind and name, but for weights that other ranks serve."""
        game = strategy.steps.game
        yield from (("buffer", name, buffer) for name, buffer in named(game, "buffers"))
        with strategy.gathered():
            for name, weight in named(game, "parameters"):
                if resharded(weight):
                    self.record.elsewhere.add(name)
                else:
                    yield "weight", name, weight

    def _note(self, phase: str, kind: str, name: str, numbers: tuple[float, ...]) -> None:
        self.record.moments[Moment(self.step, phase, kind, name)] = numbers


class Recorded(PhaseStrategy):
    def __init__(self, policy: str, recorder: Recorder, **kwargs: Any) -> None:
        super().__init__(policy, **kwargs)
        self.recorder = recorder

    def run(self, phase: Phase, batch: Any) -> None:
        before = random_state.capture()
        with self.recorder.watching as casts:
            super().run(phase, batch)
        self.recorder.record.cast |= casts is not None and torch.float32 in casts.dtypes
        if self.steps.watch.trial is not None:
            return
        if random_state.changed(before):
            self.recorder.record.drew.add(phase.name)
        self.recorder.after(phase, self)


def named(game: GanModule, kind: str) -> Iterator[tuple[str, Tensor]]:
    """All "parameters" or "buffers" of a game: first the players', by the player's name and their own, then others."""
    seen: set[int] = set()
    modules = {f"{name}.": player.module for name, player in game.players.items()}
    for place, module in {**modules, "": game}.items():
        for name, tensor in getattr(module, f"named_{kind}")():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield place + name, tensor


def _averages(strategy: PhaseStrategy) -> Iterator[tuple[str, str, Tensor]]:
    with strategy.averaged():
        for player, policy in strategy.policies.items():
            module, buffers = policy.player.module, policy.player.ema_buffers == "averaged"
            if policy.ema is not None:
                kept = [*module.named_parameters(), *(module.named_buffers() if buffers else ())]
                yield from (("average", f"{player}.{name}", tensor) for name, tensor in kept)


# ---- two trainings compared ----


SPREAD = 100.0
# What is equal, the largest tolerance, and what a smaller number counts as: in float64 and float32.
LIMITS = {"64": (1e-10, 1e-6, 1.0), "32": (1e-4, math.inf, 1e-2)}


@dataclass(frozen=True)
class Tolerance:
    """How far ranks may be off from one device: `exact`, and more, up to `most`, where rounding does more.

    [Note: what rounding does]
    Ranks add up in another order than one device, so their numbers are rounded otherwise. Some games make that larger.
    Adam moves a weight whose gradient is nothing but rounding (a bias before a norm), and small differences grow from
    step to step. So one device trains twice, the second time with the last bits of all weights changed before each
    step. A number may be off by SPREAD times what this has changed of the same tensor, up to the same step.

    Float32 has few digits, so in it a distance is said in units of what rounding does.
    """

    exact: float
    most: float
    least: float = 1.0
    moved: Mapping[tuple[str, str, int], float] = field(default_factory=dict)  # by kind, name and step
    ends: Mapping[str, float] = field(default_factory=dict)  # of the last weights, buffers and averages

    @classmethod
    def measured(cls, one: Record, shaken: Record, precision: str) -> "Tolerance":
        """From one device's training and its second one, which was compared with the first."""
        exact, most, least = LIMITS[precision]
        largest, moved = {}, {}
        for moment, numbers in one.moments.items():
            if moment.kind != "batch" and moment in shaken.moments:
                found = max(largest.get(moment[2:], 0.0), gap(shaken.moments[moment], numbers, least))
                largest[moment[2:]] = moved[moment.kind, moment.name, moment.step] = found
        return cls(exact, most, least, moved, shaken.distances)

    def at(self, moment: Moment) -> float:
        return self._of(self.moved.get((moment.kind, moment.name, moment.step), 0.0))

    def at_end(self, name: str) -> float:
        return self._of(self.ends.get(name, 0.0))

    @property
    def above(self) -> int:
        """How many of the last tensors may be off by more than `exact`."""
        return sum(self.at_end(name) > self.exact for name in self.ends)

    @property
    def coarse(self) -> bool:
        """Whether distances are said in units of what rounding does."""
        return self.least < 1

    def _of(self, rounding: float) -> float:
        return min(max(self.exact, SPREAD * rounding), self.most)


@dataclass(frozen=True)
class Difference:
    """What differs most of its kind, where the training differs first. `others`: how many more of its kind differ."""

    moment: Moment
    many: float
    one: float
    gap: float
    others: int = 0

    def __str__(self) -> str:
        kind, name, more = self.moment.kind, self.moment.name, f", and {self.others} more" if self.others else ""
        if kind == "phase":
            return "it is played by some and not by all"
        if kind == "batch":
            return "the ranks together get other samples than one device does, or in another order"
        if kind == "loss":
            return f"loss '{name}' is {two_numbers(self.many, self.one)}{more}"
        if kind == "gradient":
            return f"the gradient of '{name}' has norm {two_numbers(self.many, self.one)}{more}"
        return f"{kind} '{name}' is off by {self.gap:.0e}{more}"


def compare(one: Record, ranks: Sequence[Record], tolerance: Tolerance) -> list[Difference]:
    """What differs in the first phase in which something does: for each kind the worst. Nothing if all is equal."""
    moments = dict.fromkeys([*one.moments, *(moment for rank in ranks for moment in rank.moments)])
    elsewhere = set().union(*(rank.elsewhere for rank in ranks))
    moments = [moment for moment in moments if moment.kind != "weight" or moment.name not in elsewhere]
    found: list[Difference] = []
    for moment in sorted(moments, key=lambda moment: moment.step):  # the order within a step stays
        if found and moment[:2] != found[0].moment[:2]:
            break
        difference = _difference(moment, one, ranks, tolerance.least)
        if not difference.gap <= tolerance.at(moment):
            found.append(difference)
    by_kind: dict[str, list[Difference]] = {}
    for difference in found:
        by_kind.setdefault(difference.moment.kind, []).append(difference)
    if "phase" in by_kind:
        return by_kind["phase"][:1]
    worst = [(max(each, key=lambda difference: difference.gap), len(each) - 1) for each in by_kind.values()]
    return [replace(difference, others=others) for difference, others in worst]


def _difference(moment: Moment, one: Record, ranks: Sequence[Record], least: float) -> Difference:
    # A weight that the loss does not reach has no gradient, or under some policies one of zeros.
    nothing = (0.0,) if moment.kind == "gradient" else None
    single, found = one.moments.get(moment, nothing), [rank.moments.get(moment, nothing) for rank in ranks]
    every = [each for each in found if each is not None]
    if single is None or len(every) < len(ranks):
        return Difference(moment._replace(kind="phase"), math.nan, math.nan, math.inf)
    if moment.kind == "batch":
        joined = tuple(code for each in every for code in each)
        same = joined == single or all(each == single for each in every)  # rows of each rank, or common to all
        return Difference(moment, math.nan, math.nan, 0.0 if same else math.inf)
    if moment.kind == "loss":
        every = [tuple(sum(numbers) / len(every) for numbers in zip(*every, strict=True))]
    gaps = [gap(each, single, least) for each in every]
    largest = max(range(len(gaps)), key=lambda rank: gaps[rank])
    return Difference(moment, every[largest][0], single[0], gaps[largest])


def gap(many: Sequence[float], one: Sequence[float], least: float = 1.0) -> float:
    """The largest difference, as a part of the first number; of `least` where that is smaller. Two NaN are equal."""
    size = max([least, *(abs(numbers[0]) for numbers in (many, one) if math.isfinite(numbers[0]))])
    apart = 0.0
    for here, there in zip(many, one, strict=True):
        if here != there and not (math.isnan(here) and math.isnan(there)):
            difference = abs(here - there) / size
            apart = math.inf if math.isnan(difference) else max(apart, difference)
    return apart


def distances(found: Mapping[str, Tensor], one: Mapping[str, Tensor]) -> dict[str, float]:
    """For each tensor the largest difference of an element, as a part of its largest element or of 1, as in `gap`."""
    apart = {name: gap_of(found.get(name), one.get(name)) for name in {**found, **one}}
    finite = {name: tensor[tensor.isfinite()] for name, tensor in one.items()}
    sizes = {name: max(1.0, gap_of(each, torch.zeros_like(each))) for name, each in finite.items()}
    return {name: each / sizes[name] if each < math.inf else math.inf for name, each in apart.items()}
