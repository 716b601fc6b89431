"""Trains a run on one device and under strategies, and judges what came of it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gan.app.verifying.comparing import SPREAD, Tolerance, compare
from gan.app.verifying.training import Request, Trained, train
from gan.files.errors import UserError
from strategies import PhaseStrategy
from strategies.check.first_step import A_MEAN_OVER_SAMPLES, THE_SAME_ON_ALL_RANKS
from strategies.check.trial import RanksDiffer
from strategies.policies import POLICIES
from strategies.processes import world

# What torch says where a tensor in float32 meets one in float64.
DTYPES = re.compile(r"\bfloat.*\bdouble\b|\bdouble\b.*\bfloat|\bdtype\b", re.IGNORECASE)
ADVICE = {  # by what differs first
    "batch": "Ranks must share the batch of one device: take GanData, GlobalLoader or GlobalStream of `datasets`.",
    "loss": A_MEAN_OVER_SAMPLES,
    "gradient": A_MEAN_OVER_SAMPLES,
    "buffer": THE_SAME_ON_ALL_RANKS,
    "weight": "What changes weights after an update must be the same on all ranks: Player(after=...), hooks. Else a "
    "gradient differs by too little to be named, and the optimizer enlarges that.",
    "average": "What changes averages must be the same on all ranks: Player(ema=...).",
    "phase": "All ranks must play the same phases in the same order; Phase(when=...) is asked on the first rank.",
    "draws": "Draws are the same at any number of ranks from gan.noise, and in phases without draws='torch'.",
}


@dataclass(frozen=True)
class Row:
    """What was found for one strategy: `words` for the table, `more` lines below them, and the ADVICE to give.

    `roundings`: the distance is in units of what rounding does. `wrong`: the check has refused the run's training.
    """

    words: str
    distance: float | None = None
    roundings: bool = False
    exact: bool = False
    refused: bool = False
    wrong: bool = False
    more: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def far(self) -> str:
        """The distance as text."""
        if self.distance is None:
            return ""
        return f"{self.distance:.2g} x rounding" if self.roundings else f"{self.distance:.0e}"


@dataclass(frozen=True)
class OneDevice:
    """The training of one device, with which others are compared. `last` is the file of its last tensors."""

    trained: Trained
    last: Path
    tolerance: Tolerance


class Verification:
    """The trainings of one command line, each in a world of its own, with a time limit in seconds."""

    def __init__(self, argv: Sequence[str], limit: float, folder: Path, precision: str, start: Path | None) -> None:
        """`start` is the checkpoint from which all trainings begin."""
        self.argv, self.limit, self.folder, self.precision, self.start = tuple(argv), limit, folder, precision, start
        self.known: dict[str, OneDevice] = {}

    def one(self, precision: str) -> OneDevice:
        """One device, in float64 or float32. It is trained once, and once more to see what rounding does."""
        if precision not in self.known:
            last = self.folder / f"float{precision}.pt"
            request = Request(self.argv, "single", 1, saved=last, precision=precision, start=self.start)
            made = self._alone(request)
            if not made.record.moments:
                raise UserError("one device has trained no step, so there is nothing to compare")
            shaken = self._alone(replace(request, saved=None, one=last, shaken=True))
            tolerance = Tolerance.measured(made.record, shaken.record, shaken.distances, precision)
            made.record.cast = shaken.record.cast
            self.known[precision] = OneDevice(made, last, tolerance)
        return self.known[precision]

    def row(self, typed: str, devices: int) -> Row:
        """Train under a strategy on so many ranks, and compare."""
        strategy = PhaseStrategy(typed)
        policies = [POLICIES[each.policy] for each in strategy.choice.values() if each.policy in POLICIES]
        packed = any(policy.package is not None for policy in policies)  # DeepSpeed computes in float32
        precision = "32" if packed else self.precision
        one = self.one(precision)
        request = Request(self.argv, typed, devices, one.last, precision=precision, start=self.start)
        try:
            found = self._train(request, devices)
        except world.WorldHangs as hangs:
            places = "; ".join(f"rank {rank} {place}" for rank, place in sorted(hangs.places.items()))
            return Row(f"hangs: {hangs}", more=(places,) if places else (), advice=("phase",))
        except world.WorldFailed as failed:
            failure = failed.failure
            if not failure.whole:
                return Row(f"fails on rank {failure.rank}: {failure.what}", more=tuple(failure.traceback.splitlines()))
            (first, *more), kind = failure.why.splitlines(), "refused" if failure.refused else "fails"
            wrong = failure.error == RanksDiffer.__name__
            return Row(f"{kind}: {first}", refused=failure.refused, wrong=wrong, more=tuple(more))
        return judged(one, found)

    def _alone(self, request: Request) -> Trained:
        try:
            return self._train(request, 1)[0]
        except world.WorldHangs as hangs:
            raise UserError(f"one device: {hangs}; type fewer --steps, a smaller run, or a longer --limit") from hangs
        except world.WorldFailed as failed:
            if failed.failure.whole:
                raise UserError(failed.failure.why) from failed
            if request.precision == "64" and DTYPES.search(failed.failure.what):
                raise UserError(
                    f"one device fails in float64, with {failed.failure.what}; if networks cast to float32 by hand, "
                    f"type --precision 32"
                ) from failed
            raise UserError(f"one device fails, with\n{failed.failure.traceback}") from failed

    def _train(self, request: Request, ranks: int) -> list[Trained]:
        connected = "@" not in request.strategy  # players on ranks of their own make their own groups
        made = world.call(
            train, request, ranks=ranks, limit=self.limit, preload=[train.__module__], connected=connected
        )
        return [each for each in made if each is not None]


def judged(one: OneDevice, ranks: Sequence[Trained]) -> Row:
    """The row for the trainings of all ranks."""
    tolerance = one.tolerance
    found = compare(one.trained.record, [rank.record for rank in ranks], tolerance)
    largest: dict[str, float] = {}
    for rank in ranks:
        for name, distance in rank.distances.items():
            largest[name] = max(distance, largest.get(name, 0.0))
    far = {"distance": max(largest.values()), "roundings": tolerance.coarse}
    if tolerance.coarse:
        far["distance"] = max(SPREAD * each / tolerance.at_end(name) for name, each in largest.items())
    if not found:
        apart = [name for name, each in largest.items() if not each <= tolerance.at_end(name)]
        if apart:
            return Row(f"differs after the last step: {max(apart, key=largest.__getitem__)}", **far)
        exact = tolerance.coarse or far["distance"] <= tolerance.exact
        return Row("exact" if exact else "exact but for rounding", exact=True, **far)

    step, phase = found[0].moment[:2]
    where = f"step {step}, phase '{phase}'" if phase else f"step {step}"
    lines, advice = [str(each) for each in found], [found[0].moment.kind]
    if any(phase in rank.record.drew for rank in ranks):
        lines.append("the phase draws from torch's own random generators, and each rank draws other numbers")
        advice = ["draws"]
    return Row(f"differs: {where}: {lines[0]}", more=tuple(lines[1:]), advice=tuple(advice), **far)
