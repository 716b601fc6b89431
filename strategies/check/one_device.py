"""The first step is tried twice: by all ranks together, and by each rank as if it were one device. Both must agree.

[Note: the law checks itself]
Any number of ranks must give the training of one device. That is a law for the code of a game too, and a game can
break it: by a statistic of the rank's own samples, a loss that is no mean over samples, a buffer that learns from the
rank's own samples. So, before the first step of a fit, the step is tried on a few samples of each rank. First each
rank plays it with its own samples, as it will in training. Then each rank plays it with the samples of all ranks, as
one device would. Gradients are reduced as in training, because then no weight must be whole anywhere, but nothing is
updated. Losses, the norm of each weight's gradient, buffers and weights must be equal. Then all is put back: buffers,
weights, random states, attributes of modules.

On a CPU step 0 is then tried with the whole batches too, because a mask, say, may be true for few samples only. That
comes second: what a pipeline is called with has other rows than the samples in the first one, and is known as a table.
An accelerator may have no memory for the samples of all ranks, so there it is left out; so it is if a loss fails
with the samples of all ranks. A loss that fails with few samples is tried with as many as there is room for, in any
step; if it fails with these too, the training itself says so.

What differs only later, such as a mask that is full in the first batch, is found when later steps are tried: at growing
distances, after a step in which all ranks have computed a loss in a new way (processes/same_on_ranks.py), and each
tenth time with `PhaseStrategy(check="often")`. What a loss keeps for later steps is compared as well. It may be a log,
so a difference is only said, and only of what the author's code also reads.
"""

import copy
import re
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gan.files.errors import UserError
from gan.pool import ImagePool
from strategies.batches.draws import ByPhase
from strategies.check import left_behind
from strategies.check.comparison import SHAKES, Comparison, moved_by_rounding, roundings, shake_weights
from strategies.check.first_difference import Calls
from strategies.check.left_behind import LeftBehind
from strategies.check.samples import deal, first_samples, has_room, on_cpu, one_each, samples_together
from strategies.check.snapshot import MovesOn, Snapshot
from strategies.check.trial import FAILS, RanksDiffer, Trial, coarse_from_the_start
from strategies.check.verdict import BY_RECOMPUTE, IN_MICRO_BATCHES, Verdict, warn_of_kept, warn_of_unlike
from strategies.processes.lost_ranks import of_a_collective
from strategies.turn import Training

HALF = 0.5  # of the loss as one device: it rounds nothing, and shows hooks that clip the gradients of all ranks alike
TWICE = 1e-3  # the relative difference of a loss that is computed twice: far above the rounding of any device
WITHOUT = "PhaseStrategy(check=False) leaves the trial out"
PATIENCE = 10.0  # seconds for all other ranks to fail as one has

Play = Callable[[Trial, Any], None]


def check_step(training: Training, batch: Any, play: Play, first: bool = True) -> None:
    """Raise if the ranks together would not train as one device does.

    `play(trial, batch)` plays the step for a trial. `first`: it plays its losses for the first time, or in a new way.
    """
    own = first_samples(training, batch)
    if own is None:
        return
    everyone = training.world.gather(own)
    if one_each(training.batches, everyone):
        _not_checked("one of its loaders gives each rank one sample, and a check needs two")
        return
    snapshot = Snapshot(training.game, training.policies)
    if snapshot.untried:
        _not_checked(MovesOn(snapshot.untried[0]))
        return
    try:
        samples, more = training.batches.join(everyone), batch
    except UserError as error:  # a loader may make samples as long as the longest one of its batch
        if (dealt := deal(training, batch)) is None:
            _not_checked(error)
            return
        (own, samples), more = dealt, None
        rank_zero_warn(
            f"{error}. Else what is drawn for a batch, and what a network makes of padding, differ from one device"
        )
    runner = TrialRunner(training, snapshot, play)
    try:
        together, lines = runner.differences(own, samples, more, first)
    except TooFew as error:
        rank_zero_warn(f"no comparison with one device: {error}. {runner.why(own)}")
        return
    except MovesOn as error:
        _not_checked(error)
        return
    _say_what_differs(runner, together, lines)


def _say_what_differs(runner: "TrialRunner", together: Trial, lines: dict[str, str]) -> None:
    """Raise, or warn of what may be right."""
    training = runner.training
    if together.unlike:
        warn_of_unlike(together.unlike)
    for phase in training.game.phases:
        if wrong := training.draws.wrong_in_parts(phase, training.batches):
            lines[f"phase '{phase.name}' has micro-batches, and draws {', '.join(wrong)}"] = IN_MICRO_BATCHES
    if lines:
        hooked = any("hook" in name for name in runner.snapshot.read)
        raise RanksDiffer(Verdict(training, together, lines, runner.whole, hooked).text())
    training.draws.agreed()
    if together.differing:
        warn_of_kept(together.differing)


def _not_checked(why: object) -> None:
    rank_zero_warn(f"nothing of this run is checked against one device, because {why}")


def check_guesses(training: Training, step: int) -> None:
    """Raise if the step has taken draws for what they are not: a trial after it has shown what they are."""
    wrong = [each for own in training.world.gather(training.draws.wrong_guesses()) for each in own]
    if wrong:
        raise RanksDiffer(
            f"step {step} drew other numbers than one device, where the game drew something for the first time: "
            f"{', '.join(dict.fromkeys(wrong))}. Whether that has a row for each sample was guessed. Draw a row for "
            f"each sample in front, and take those that you need; or one draw of the whole batch by gan.noise with "
            f"common=True" + ". Weights and checkpoints differ since this step, so begin again" * (step > 0)
        )


def learn_draws(training: Training, batch: Any, play: Play, first: bool = True) -> None:
    """On one device: find out where the samples are in what micro-batches draw, by two trials of a few samples."""
    game, batches = training.game, training.batches
    snapshot, together = Snapshot(game, training.policies), samples_together(training)
    runner = TrialRunner(training, snapshot, play)
    runner.coarse = {phase.name for phase in game.phases}
    # A game may refuse a few samples, or need a whole batch.
    sizes: list[int] = []
    with suppress(UserError):  # a training_step of the author's may make its batch from anything
        most = batches.rows(batch)
        sizes = [each for each in (2 * together, most) if each <= most and not snapshot.untried]
    read: left_behind.Read = {}
    for size in sizes:
        with suppress(TooFew, MovesOn, UserError):
            twice = batches.join([on_cpu(batch)] * 2)
            few, many = (runner.run(batches.first_rows(twice, each)) for each in (size, 2 * size))
            training.draws.learn([(few.drawn, many.drawn)])
            read = few.left.also_in(many.left)
            break
    left_behind.refuse(read)
    for phase in game.phases:
        if wrong := training.draws.wrong_in_parts(phase, training.batches):
            raise UserError(f"phase '{phase.name}' has micro-batches, and draws {', '.join(wrong)}. {IN_MICRO_BATCHES}")
        if unknown := training.draws.unknown_in_parts(phase):
            rank_zero_warn(
                f"phase '{phase.name}' draws {', '.join(unknown)}. Where the samples are in it could not be tried, so "
                f"its micro-batches get the same numbers; draw with the samples in front"
            )


class TooFew(Exception):
    """A loss fails on the samples of a trial, on all ranks. It may need more, or remember an earlier batch."""


Found = tuple[Trial, dict[str, str]]  # the first trial, and what differs, with what to do


class TrialRunner:
    """Tries a step again and again, each time from one snapshot."""

    def __init__(self, training: Training, snapshot: Snapshot, play: Play) -> None:
        self.game, self.training, self.snapshot, self.play = training.game, training, snapshot, play
        self.whole = False  # whether the batches are whole: then one device may have no room for all
        self.coarse = coarse_from_the_start(training)  # phases that are tried in the run's precision
        self.failed = ""  # the last phase whose loss has failed
        # A trial deals the samples out otherwise, so each pool gets the images of all ranks.
        self.pools = [each for each in self.game.modules() if isinstance(each, ImagePool)]
        everyone = training.world.gather((uuid.uuid4().hex, [on_cpu(pool.own()) for pool in self.pools]))
        self.images = [images for _, images in everyone]
        self.key, self.trials = f"trial {everyone[0][0]}", 0

    def run(self, samples: Any, alone: bool = False, shake: int = 0) -> Trial:
        step, world = self.game.step, self.training.world
        self.trials += 1
        scale = 1 + 2 * shake if shake or not alone else HALF
        left = LeftBehind(self.game, self.training.batches)
        key = f"{self.key}/{self.trials}"
        trial = Trial(world, step, key, left, alone, scale, self.coarse, watched=bool(shake))
        with ExitStack() as stack:
            stack.callback(self.snapshot.put_back)
            stack.enter_context(left.watching)
            # Loggers hear nothing of a trial, of what a loss logs by itself either.
            stand_ins = self.snapshot.take_places()
            vars(self.game)["log"] = lambda *_, **__: None
            self.game.trainer.loggers = [DummyLogger() for _ in self.game.trainer.loggers]
            for number, pool in enumerate(self.pools):
                for of_rank in self.images:
                    pool.slots |= {place: list(own) for place, own in of_rank[number].items()}
            if shake:
                shake_weights(self.training.policies.values(), shake)
            try:
                with ExitStack() as as_one:
                    for policy in self.training.policies.values() if alone else ():
                        as_one.enter_context(policy.as_one_device())
                    # A loss may write into its samples.
                    self.play(trial, move_data_to_device(copy.deepcopy(samples), world.device))
                    if asked := [each.name for each in stand_ins if each.asked]:  # the author has caught the error
                        raise MovesOn(asked[0])
                    trial.state, trial.remembered = self.snapshot.written(), self.snapshot.remembered()
                    if left.hidden:  # does a phase of the next step read it?
                        again = Trial(world, step, f"{key}/again", left, alone, scale, self.coarse)
                        self.play(again, move_data_to_device(copy.deepcopy(samples), world.device))
            except Exception as error:
                count, how = self.training.batches.rows(samples), " as one device with one rank" * alone
                tried = f"step {step} was tried on {count} samples{how}"
                error.add_note(f"while {tried}; {WITHOUT}")
                # A game may refuse a number of samples. Later trials have one that training has not.
                refused = isinstance(error, UserError) and (not alone if self.whole else not step)
                if refused or isinstance(error, RanksDiffer) or of_a_collective(error):  # another rank may be gone
                    raise
                met = trial.meet(f"{FAILS}{error}", PATIENCE)
                if isinstance(error, MovesOn) and not met:
                    raise UserError(f"{error}. As not all ranks do so, nothing can be tried: {WITHOUT}") from error
                if isinstance(error, MovesOn) or not met:
                    raise
                self.failed = trial.phase
                raise TooFew(f"{tried}, and a loss fails: {error}") from error
            trial.meet("has ended the step")
        return trial

    def why(self, own: Any) -> str:
        """What may have let a loss fail on this rank's samples."""
        found = {name: each.recompute for name, each in self.training.policies.items() if each.recompute}
        with ExitStack() as stack, suppress(TooFew, MovesOn):
            without = [stack.enter_context(mock.patch.object(each, "on", False)) for each in found.values()]
            if without and self.run(own):
                return f"Without option recompute of player {' and '.join(found)} none fails. {BY_RECOMPUTE}"
        return "Perhaps it needs or remembers a larger batch"

    def differences(self, own: Any, samples: Any, batch: Any, first: bool) -> Found:
        """What differs in full precision; a phase whose loss fails there, as where an author casts, in the run's."""
        while True:
            try:
                return self._differences(own, samples, batch, first)
            except TooFew:
                if self.failed in self.coarse:
                    raise
                self.coarse.add(self.failed)

    def _differences(self, own: Any, samples: Any, batch: Any, first: bool) -> Found:
        """What differs on a few samples of each rank, or on as many as there is room for, where a few cannot tell.

        `own` is this rank's part of `samples`. Without a `batch` there are no more.
        """
        self.whole = False
        try:
            found = self.compare(own, samples)
            if self._take_otherwise(found[1]):
                found = found[0], self.compare(own, samples)[1]
        except TooFew:  # a loss may need a pack of ten samples, or take the best twelve of a batch
            if (more := self._on_more(batch)) is None:
                raise
            return (self._on_more(batch) or more) if self._take_otherwise(more[1]) else more
        # A mask may be true for few samples only; and two samples are too few for virtual batches of four.
        few = found
        if found[1] or (first and has_room(self.training, own, batch)):
            with suppress(TooFew):
                found = self._on_more(batch) or found
        if found is few or (first and few[1] and found[1]):  # then the error is that of a device without room for more
            found, self.whole = few, False
        return found

    def _take_otherwise(self, lines: Collection[str]) -> bool:
        """Whether what differs may be a draw that was misread, and is read otherwise now."""
        phases = {phase.name for phase in self.game.phases}
        named = {phase for phase in phases if any(f"phase '{phase}'" in text for text in lines)}
        return bool(lines) and self.training.draws.take_otherwise(phases - named if named else ())

    def _on_more(self, batch: Any) -> Found | None:
        if batch is None:
            return None
        each = self.training.world.gather(first_samples(self.training, batch, most=True))
        if any(part is None for part in each):
            return None
        own = each[self.training.world.rank]
        batches = self.training.batches
        self.whole = batches.rows(own) == batches.rows(batch)
        return self.compare(own, batches.join(each))

    def compare(self, own: Any, samples: Any) -> Found:
        """Try the step with all ranks together, and with each alone. Returns the first trial, and what differs.

        What differs on one rank is returned on all of them.
        """
        training, gather, batches = self.training, self.training.world.gather, self.training.batches
        if batches.rows(own) == 1:  # a draw of one row may be the sample's, or one for the whole batch
            with suppress(TooFew):
                few, many = (self.run(batches.join([own] * count)) for count in (2, 4))
                training.draws.learn(gather((few.drawn, many.drawn)))
        together, alone = self.run(own), self.run(samples, alone=True)
        if training.draws.learn(gather((together.drawn, alone.drawn))):
            together, alone = self.run(own), self.run(samples, alone=True)
        read = together.left.also_in(alone.left)
        of_rank = together.unlike, together.losses, alone.losses, read, together.drawn_alike
        unlike, losses, again, read, drawn_alike = zip(*gather(of_rank), strict=True)
        training.draws.by_dice |= any(drawn_alike)
        left_behind.refuse({name: phases for each in read for name, phases in each.items()})
        together.unlike = {name for each in unlike for name in each}
        turns = {phase for phase, _ in together.norms.keys() ^ alone.norms.keys()}  # a `when` has said other things
        comparison = Comparison(losses, again, together, alone, roundings(together.dtypes), together.unlike | turns)
        remembered: dict[str, list[Tensor]] = defaultdict(list)
        for of_rank in gather(comparison.remembered()):  # a rank has only what differs there
            for name, value in of_rank.items():
                remembered[name].append(value)
        alike = [name for name, (first, *others) in remembered.items() if all(map(first.equal, others))]
        together.differing = sorted({re.sub(r"(\.\d+)+$", "", name) for name in alike})  # without the numbers of items
        lines = comparison.lines({})
        if not any(gather(bool(lines))):
            return together, {}
        together.collectives = alone.collectives
        shaken = [self.run(samples, alone=True, shake=number + 1) for number in range(SHAKES)]
        seen = [dtypes for each in gather([trial.dtypes for trial in (together, *shaken)]) for dtypes in each]
        lines = replace(comparison, rounding=roundings(*seen)).lines(moved_by_rounding(alone, shaken))
        found = dict(line for each in gather(lines) for line in each.items())
        if found:
            self._explain(together, own, samples)
        return together, found

    def _explain(self, trial: Trial, own: Any, samples: Any) -> None:
        """Where each phase begins to differ, and which gives another loss each time, by two trials more.

        Of all ranks the one counts that differs first. Nothing where modules run on some of the ranks only.
        """
        if not all(policy.runs_everywhere for policy in self.training.policies.values()):
            return
        batches = self.training.batches
        together, alone = Calls(self.game, batches), Calls(self.game, batches)
        drawn: ByPhase = {}
        unlike: set[str] = set()
        with suppress(TooFew, UserError):
            with together.noted():
                again = self.run(own)
            with alone.noted():
                self.run(samples, alone=True)
            drawn = again.drawn
            once = {key: trial.losses.get(key, loss) for key, loss in again.losses.items()}
            unlike = {key[0] for key, loss in again.losses.items() if abs(loss - once[key]) > TWICE * abs(loss)}
        world = self.training.world
        trial.unrepeated = {phase for each in world.gather(unlike) for phase in each}
        for phase in self.game.phases:
            count = max(1, batches.rows(own) // phase.micro_batches)
            each = world.gather(together.first_unlike(alone, phase.name, world, count, drawn.get(phase.name, {})))
            trial.begins += sorted((begin for begin in each if begin is not None), key=lambda begin: begin.at)[:1]
