"""Trains a run on one device and under strategies, and judges what came of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gan.errors import UserError
from gan.verify.comparing import Tolerance, compare
from gan.verify.training import Request, Trained, train
from strategies import PhaseStrategy
from strategies.check.first_step import A_MEAN_OVER_SAMPLES, THE_SAME_ON_ALL_RANKS
from strategies.policies import POLICIES
from strategies.processes import world

ADVICE = {  # by what differs first
    "batch": "Ranks must share the batch of one device: take GanData, GlobalLoader or GlobalStream of `datasets`.",
    "loss": A_MEAN_OVER_SAMPLES,
    "gradient": A_MEAN_OVER_SAMPLES,
    "buffer": THE_SAME_ON_ALL_RANKS,
    "weight": "What changes weights in or after an update must be the same on all ranks: Player(after=...), hooks.",
    "average": "What changes averages must be the same on all ranks: Player(ema=...).",
    "phase": "All ranks must play the same phases in the same order; Phase(when=...) is asked on the first rank.",
    "draws": "Noise that is the same at any number of ranks comes from gan.noise.",
}


@dataclass(frozen=True)
class Row:
    """What was found for one strategy: `words` for the table, `more` lines below them, and the ADVICE to give."""

    words: str
    distance: float | None = None
    exact: bool = False
    refused: bool = False
    more: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()


@dataclass(frozen=True)
class OneDevice:
    """The training of one device, with which others are compared. `last` is the file of its last tensors."""

    trained: Trained
    last: Path
    tolerance: Tolerance


class Verification:
    """The trainings of one command line, each in a world of its own, with a time limit in seconds."""

    def __init__(self, argv: Sequence[str], limit: float, folder: Path) -> None:
        self.argv, self.limit, self.folder = tuple(argv), limit, folder
        self.known: dict[bool, OneDevice] = {}

    def one(self, double: bool = True) -> OneDevice:
        """One device, in float64 or float32. It is trained once, and once more to see what rounding does."""
        if double not in self.known:
            last = self.folder / f"{'float64' if double else 'float32'}.pt"
            made = self._alone(Request(self.argv, "single", 1, saved=last, double=double))
            shaken = self._alone(Request(self.argv, "single", 1, one=last, shaken=True, double=double))
            tolerance = Tolerance.measured(made.record, shaken.record, shaken.distances, double)
            self.known[double] = OneDevice(made, last, tolerance)
        return self.known[double]

    def row(self, typed: str, devices: int) -> Row:
        """Train under a strategy on so many ranks, and compare."""
        strategy = PhaseStrategy(typed)
        policies = [POLICIES[each.policy] for each in strategy.choice.values() if each.policy in POLICIES]
        double = all(policy.package is None for policy in policies)  # DeepSpeed computes in float32
        one, ranks = self.one(double), 1 if strategy.threaded else devices
        try:
            found = self._train(Request(self.argv, typed, devices, one.last, double=double), ranks)
        except world.WorldHangs as hangs:
            places = "; ".join(f"rank {rank} was in {place}" for rank, place in sorted(hangs.places.items()))
            return Row(f"hangs: {hangs}", more=(places,) if places else (), advice=("phase",))
        except world.WorldFailed as failed:
            failure = failed.failure
            if failure.message is None:
                return Row(f"fails on rank {failure.rank}: {failure.what}", more=tuple(failure.traceback.splitlines()))
            return Row(f"{'refused' if failure.refused else 'fails'}: {failure.message}", refused=failure.refused)
        return judged(one, found)

    def _alone(self, request: Request) -> Trained:
        try:
            return self._train(request, 1)[0]
        except world.WorldHangs as hangs:
            raise UserError(f"one device: {hangs}; type fewer --steps, a smaller run, or a longer --limit") from hangs
        except world.WorldFailed as failed:
            if failed.failure.message is not None:
                raise UserError(failed.failure.message) from failed
            raise UserError(f"one device fails, with\n{failed.failure.traceback}") from failed

    def _train(self, request: Request, ranks: int) -> list[Trained]:
        connected = "@" not in request.strategy  # players on ranks of their own make their own groups
        made = world.call(
            train, request, ranks=ranks, limit=self.limit, preload=[train.__module__], connected=connected
        )
        return [each for each in made if each is not None]


def judged(one: OneDevice, ranks: Sequence[Trained]) -> Row:
    """The row for the trainings of all ranks."""
    found = compare(one.trained.record, [rank.record for rank in ranks], one.tolerance)
    largest: dict[str, float] = {}
    for rank in ranks:
        for name, distance in rank.distances.items():
            largest[name] = max(distance, largest.get(name, 0.0))
    distance = max(largest.values())
    if not found:
        apart = [name for name, each in largest.items() if not each <= one.tolerance.at_end(name)]
        if apart:
            return Row(f"differs after the last step: {max(apart, key=largest.__getitem__)}", distance)
        return Row("exact" if distance <= one.tolerance.exact else "exact but for rounding", distance, exact=True)

    step, phase = found[0].moment[:2]
    where = f"step {step}, phase '{phase}'" if phase else f"step {step}"
    lines, advice = [str(each) for each in found], [found[0].moment.kind]
    if any(phase in rank.record.drew for rank in ranks):
        lines.append("the phase draws from torch's own random generators, and each rank draws other numbers")
        advice = ["draws"]
    return Row(f"differs: {where}: {lines[0]}", distance, more=tuple(lines[1:]), advice=tuple(advice))
