"""Trains a run on one device and under strategies, and judges what came of it."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning import seed_everything
from lightning.fabric.plugins.environments import LightningEnvironment

from gan.app.fitting.train import strategy_of, trainer_of
from gan.app.outputs import quiet
from gan.app.run.folder import holding, json_in
from gan.app.run.options import run_settings
from gan.app.run.resumed import Resumed
from gan.app.verifying.records import SPREAD, Record, Recorded, Recorder, Tolerance, compare, distances
from gan.files.checkpoint import load
from gan.files.errors import UserError
from gan.runs import build
from gan.runs.run import made_to
from strategies import PhaseStrategy
from strategies.check.comparison import A_MEAN_OVER_SAMPLES, THE_SAME_ON_ALL_RANKS
from strategies.check.trial import RanksDiffer
from strategies.policies import POLICIES
from strategies.processes.call_on_ranks import WorldFailed, WorldHangs, call

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
    "phase": "All ranks must play the same phases in the same order; in Phase(when=...) the first rank decides.",
    "draws": "Draws are the same at any number of ranks from gan.noise, and in phases without draws='torch'.",
}


def train(
    settings: Namespace,
    strategy: str,
    devices: int,
    *,
    precision: str = "64",
    start: Path | None = None,
    one: Path | None = None,
    saved: Path | None = None,
    shaken: bool = False,
) -> Record:
    """On this rank of a world, train what was typed as `gan.fit` would, with nothing beside the training itself.

    `precision` is 64 or 32, and `start` the checkpoint to begin from. `one` is a file of one device's tensors after the
    last step, to compare with; `saved` is such a file, to be written. `shaken`: the last bits of all weights are
    changed before each step. See [Note: what rounding does].
    """
    quiet()
    settings.precision = precision
    seed_everything(settings.get("seed", 0), verbose=False)
    now = run_settings(settings)
    with made_to("train") if start is None else made_to("resume", json_in(holding(start).networks)):
        run, first = build(settings.run, **now), 0
    if start is not None:
        Resumed(holding(start), settings.run, now).check()
        first = load(start)["global_step"]
    recorder = Recorder(first + settings.steps, shaken, sees_casts=shaken and precision == "64")
    own = {"kind": Recorded, "recorder": recorder, "cluster_environment": LightningEnvironment()}
    trainer = trainer_of(
        settings,
        strategy_of(settings, strategy, **own),
        max(run.max_steps, recorder.last_step),
        accelerator="cpu",
        devices=devices,
        callbacks=[recorder],
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
    )
    record, began = recorder.record, time.monotonic()
    trainer.fit(run.game, run.data, ckpt_path=start)
    record.seconds = time.monotonic() - began
    last, record.last = record.last, {}
    if saved is not None:
        torch.save(last, saved)
    if one is not None:
        there = {f"weight '{name}'" for name in record.elsewhere}
        others = {name: tensor for name, tensor in torch.load(one).items() if name not in there}
        record.distances = distances(last, others)
    return record


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
        if self.distance is None:
            return ""
        return f"{self.distance:.2g} x rounding" if self.roundings else f"{self.distance:.0e}"


@dataclass(frozen=True)
class OneDevice:
    """The training of one device, with which others are compared. `last` is the file of its last tensors."""

    record: Record
    last: Path
    tolerance: Tolerance


class Verification:
    """The trainings of one command line, each in a world of its own, with a time limit in seconds."""

    def __init__(self, settings: Namespace, folder: Path, start: Path | None) -> None:
        """`start` is the checkpoint from which all trainings begin."""
        self.settings, self.folder, self.start = settings, folder, start
        self.known: dict[str, OneDevice] = {}

    def one(self, precision: str) -> OneDevice:
        """One device, in float64 or float32. It is trained once, and once more to see what rounding does."""
        if precision not in self.known:
            last = self.folder / f"float{precision}.pt"
            made = self._alone(precision, saved=last)
            if not made.moments:
                raise UserError("one device has trained no step, so there is nothing to compare")
            shaken = self._alone(precision, one=last, shaken=True)
            made.cast = shaken.cast
            self.known[precision] = OneDevice(made, last, Tolerance.measured(made, shaken, precision))
        return self.known[precision]

    def row(self, typed: str, devices: int) -> Row:
        policies = [POLICIES.get(each.policy) for each in PhaseStrategy(typed).choice.values()]
        packed = any(each is not None and each.package for each in policies)  # DeepSpeed computes in float32
        precision = "32" if packed else self.settings.precision
        one = self.one(precision)
        try:
            found = self._train(typed, devices, precision, one=one.last)
        except WorldHangs as hangs:
            places = "; ".join(f"rank {rank} {place}" for rank, place in sorted(hangs.places.items()))
            return Row(f"hangs: {hangs}", more=(places,) if places else (), advice=("phase",))
        except WorldFailed as failed:
            failure = failed.failure
            if not failure.whole:
                return Row(f"fails on rank {failure.rank}: {failure.what}", more=tuple(failure.traceback.splitlines()))
            (first, *more), kind = failure.why.splitlines(), "refused" if failure.refused else "fails"
            wrong = failure.error == RanksDiffer.__name__
            return Row(f"{kind}: {first}", refused=failure.refused, wrong=wrong, more=tuple(more))
        return judged(one, found)

    def _alone(self, precision: str, **more: Any) -> Record:
        try:
            return self._train("single", 1, precision, **more)[0]
        except WorldHangs as hangs:
            raise UserError(f"one device: {hangs}; type fewer --steps, a smaller run, or a longer --limit") from hangs
        except WorldFailed as failed:
            if failed.failure.whole:
                raise UserError(failed.failure.why) from failed
            if precision == "64" and DTYPES.search(failed.failure.what):
                raise UserError(
                    f"one device fails in float64, with {failed.failure.what}; if networks cast to float32 by hand, "
                    f"type --precision 32"
                ) from failed
            raise UserError(f"one device fails, with\n{failed.failure.traceback}") from failed

    def _train(self, strategy: str, devices: int, precision: str, **more: Any) -> list[Record]:
        """What each rank that trains has recorded; for `more` see `train`."""
        work = partial(train, self.settings, strategy, devices, precision=precision, start=self.start, **more)
        connected = "@" not in strategy  # players on ranks of their own make their own groups
        made = call(work, ranks=devices, limit=self.settings.limit, preload=[train.__module__], connected=connected)
        return [each for each in made if each is not None]


def judged(one: OneDevice, ranks: Sequence[Record]) -> Row:
    tolerance = one.tolerance
    found = compare(one.record, ranks, tolerance)
    names = dict.fromkeys(name for rank in ranks for name in rank.distances)
    largest = {name: max(rank.distances.get(name, 0.0) for rank in ranks) for name in names}
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
    if any(phase in rank.drew for rank in ranks):
        lines.append("the phase draws from torch's own random generators, and each rank draws other numbers")
        advice = ["draws"]
    return Row(f"differs: {where}: {lines[0]}", more=tuple(lines[1:]), advice=tuple(advice), **far)
