"""The training of several ranks compared with that of one device: where it differs first, and in what."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gan.app.verifying.recording import Moment, Record
from strategies.check.first_step import both

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
        """For a number on the way."""
        return self._of(self.moved.get((moment.kind, moment.name, moment.step), 0.0))

    def at_end(self, name: str) -> float:
        """For one of the last tensors."""
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
            return f"loss '{name}' is {both(self.many, self.one)}{more}"
        if kind == "gradient":
            return f"the gradient of '{name}' has norm {both(self.many, self.one)}{more}"
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
    return [Difference(d.moment, d.many, d.one, d.gap, others) for d, others in worst]


def _difference(moment: Moment, one: Record, ranks: Sequence[Record], least: float) -> Difference:
    # A weight that the loss does not reach has no gradient, or under some policies one of zeros.
    nothing = (0.0,) if moment.kind == "gradient" else None
    single, every = one.moments.get(moment, nothing), [rank.moments.get(moment, nothing) for rank in ranks]
    if single is None or any(each is None for each in every):
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
    return {name: _distance(found.get(name), one.get(name)) for name in found | one}


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return math.inf
    if not one.numel():
        return 0.0
    one, other = (each.cdouble() if each.is_complex() else each.double() for each in (one, other))
    apart = ((one - other).abs() / other.abs().max().clamp_min(1)).max().item()
    return math.inf if math.isnan(apart) else apart
