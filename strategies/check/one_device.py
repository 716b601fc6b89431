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
distances, after a step in which all ranks have computed a loss in a new way (processes/equal_rows.py), and each tenth
time with `PhaseStrategy(check="often")`. What a loss keeps for later steps is compared as well. It may be a log,
so a difference is only said, and only of what the author's code also reads.
"""

import copy
import math
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities import rank_zero_warn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from gan.files.errors import UserError
from gan.module import GanModule
from gan.phase import Phase
from gan.pool import ImagePool
from nets.norm import rows_together, unsynchronised
from strategies.check.trial import RanksDiffer, Snapshot, Trial
from strategies.draws import BY_GENERATOR
from strategies.micro_batches import deal_batch, first_rows, join_batches, rows
from strategies.observers import Casts, OwnCollectives
from strategies.policies.policy import Policy
from strategies.processes.lost_ranks import of_a_collective
from strategies.turn import Training

SAMPLES = 2  # of each rank, at least
ROOM = {"cpu": 4}  # a device may get so many times its own batch; a GPU once, because it may have no more memory
SHOWN = 6  # differences in the error

# Two numbers are equal if they differ by less than this part of their size: sums in another order are rounded anew.
# With 2e-5 for float32 StyleGAN2 was refused on CPUs: rounding turns a sign now and then, before a leaky ReLU.
ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-3}
COARSE = 5e-2  # for bfloat16 and float16
# What differs by more is compared with what rounding does to it. See [Note: rounding is measured].
PATIENCE = 10.0  # seconds for all other ranks to fail as one has
SHAKES, SPREAD = 3, 100.0
# But a gradient of this part of the player's largest, and this part of a loss, are not made of rounding alone.
SMALL = 1e-2
LEAST = 1e-4  # gradients that differ by this part of the rounding of the largest one are equal: sums that cancel
SMALL_LOSS = 1e-3  # smaller losses are taken as if they had this size

THE_SAME_ON_ALL_RANKS = "Write what is the same on all ranks: gan.ranks.mean(x) or gan.ranks.sum(x) in place of x."
WORDS = "Let gan.ranks.sum(x), gan.ranks.mean(x) and gan.ranks.gather(x) do that."
REMEMBERED = (
    "What a loss remembers from earlier steps must be the same on all ranks: keep gan.ranks.mean(x), gan.ranks.sum(x) "
    "or gan.ranks.gather(x) in place of x. So must what hooks write to weights: draw for it from a torch.Generator "
    "that is seeded alike on all ranks."
)
A_MEAN_OVER_SAMPLES = (
    "A loss must be a mean over samples. Where it needs a number of the whole batch, take gan.ranks.mean(x), "
    "gan.ranks.sum(x) or gan.ranks.gather(x). So must a batch norm that is written by hand, or call F.batch_norm."
)
DRAWS = (
    "The phase draws. A draw must have a row for each sample, or several: all draws of the game in blocks, as "
    "torch.cat makes them, or all side by side, as nn.MultiheadAttention drops its weights (not with "
    "need_weights=False)."
)
DRAWS_ALIKE = (
    "NumPy and random give all ranks the same numbers: draw what each sample has of its own with torch or gan.noise."
)
IN_MICRO_BATCHES = "In micro-batches the rows of a draw must be the samples, in blocks; or leave micro_batches= out."
DRAWS_BY_GENERATOR = (
    "The phase draws with generator=. Leave that out, or take gan.noise; or seed the generator alike on all ranks, and "
    "give it to torch.randn, torch.rand and torch.randint only."
)


def check_step(
    game: GanModule,
    training: Training,
    batch: Any,
    ready: Callable[[Phase], bool],
    play: Callable[[Trial, Any], None],
) -> None:
    """Raise if the ranks together would not train as one device does.

    `ready`: whether a phase with a `when` is tried. `play(trial, batch)` plays the step for a trial.
    """
    own, gather = _samples(game, training, batch), training.world.gather
    if len(set(gather(None if own is None else rows(own)))) > 1 or own is None:  # unequal rows are refused in the phase
        return
    kept = Snapshot(game, training.policies)
    if kept.iterators:
        rank_zero_warn(
            f"the first step is not checked against one device, because a trial would move on the iterator "
            f"'{kept.iterators[0]}', which cannot be put back; let batches come from train_dataloader()"
        )
        return
    tries = Tries(game, training, kept, play)
    tries.compare_answers(ready)
    fits = rows(own) < rows(batch) and training.world.size <= ROOM.get(training.world.device.type, 1)
    dealt = None
    try:
        samples = join_batches(gather(own))
    except UserError as error:  # a loader may make samples as long as the longest one of its batch
        if (dealt := _dealt(game, training, batch)) is None:
            rank_zero_warn(f"the first step is not checked against one device, because {error}")
            return
        own, samples = dealt
        rank_zero_warn(
            f"{error}. Else what is drawn for a batch, and what a network makes of padding, differ from one device"
        )

    def with_more() -> tuple[Trial, dict[str, str]] | None:
        each = gather(_samples(game, training, batch, most=True))
        if dealt or any(part is None for part in each):
            return None
        tries.whole = rows(each[training.world.rank]) == rows(batch)
        return tries.compare(each[training.world.rank], join_batches(each))

    try:
        try:
            together, lines = tries.compare(own, samples)
            if lines and training.draws.take_otherwise():
                _, lines = tries.compare(own, samples)
        except TooFew:  # a loss may need a pack of ten samples, or take the best twelve of a batch
            if (found := with_more()) is None:
                raise
            together, lines = found
        if lines and game.step and not tries.whole:  # what takes each second sample goes otherwise through three
            with suppress(TooFew):
                together, lines = with_more() or (together, lines)
        if fits and game.step == 0 and not (lines or tries.whole):
            with suppress(TooFew):
                _, lines = with_more() or (together, lines)
    except TooFew as error:
        rank_zero_warn(f"no comparison with one device: {error}")
        return
    if together.unlike:
        rank_zero_warn(
            f"phase {', '.join(map(repr, sorted(together.unlike)))}: not compared with one device, because it draws "
            f"other numbers on each rank: by Phase(draws='torch'), in backward, or within nn.LSTM or attention on a GPU"
        )
    for phase in game.phases:
        if wrong := training.draws.wrong_in_parts(phase):
            lines[f"phase '{phase.name}' has micro-batches, and draws {', '.join(wrong)}"] = IN_MICRO_BATCHES
    if lines:
        which = "all" if tries.whole else "a few"
        raise RanksDiffer(_said(lines, which, training, game.step, together))
    training.draws.agreed()
    if together.own:
        rank_zero_warn(
            f"a loss keeps {_kept_otherwise(together)}. That is right for a log, but what losses read must be the same "
            f"on all ranks: keep gan.ranks.mean(x), gan.ranks.sum(x) or gan.ranks.gather(x) in place of x"
        )


def check_guesses(training: Training, step: int) -> None:
    """Raise if the step has taken draws for what they are not: a trial after it has shown what they are."""
    wrong = [each for own in training.world.gather(training.draws.wrong_guesses()) for each in own]
    if wrong:
        raise RanksDiffer(
            f"step {step} drew other numbers than one device, where the game drew something for the first time: "
            f"{', '.join(dict.fromkeys(wrong))}. Whether that has a row for each sample was guessed. Draw it by "
            f"gan.noise, with common=True for one draw of the whole batch. Weights and checkpoints differ since this "
            f"step, so begin again"
        )


class Tries:
    """Tries a step again and again, each time from what was kept."""

    def __init__(self, game: GanModule, training: Training, kept: Snapshot, play: Callable[[Trial, Any], None]) -> None:
        self.game, self.training, self.kept, self.play = game, training, kept, play
        self.whole = False  # whether the batches are whole: then one device may have no room for all
        # A trial deals the samples out otherwise, so each pool gets the images of all ranks.
        self.pools = [each for each in game.modules() if isinstance(each, ImagePool)]
        everyone = training.world.gather((uuid.uuid4().hex, [_on_cpu(pool.own()) for pool in self.pools]))
        self.images = [images for _, images in everyone]
        self.key, self.trials = f"trial {everyone[0][0]}", 0

    def __call__(self, samples: Any, alone: bool = False, shake: int = 0) -> Trial:
        step, world = self.game.step, self.training.world
        self.trials += 1
        trial = Trial(world, step, f"{self.key}/{self.trials}", alone, scale=1 + 2 * shake)
        with self.kept.aside():
            for number, pool in enumerate(self.pools):
                for of_rank in self.images:
                    pool.slots |= {place: list(own) for place, own in of_rank[number].items()}
            vars(self.game)["log"] = lambda *_, **__: None
            if shake:
                shake_weights(self.training.policies.values(), shake)
            try:
                self.play(trial, move_data_to_device(copy.deepcopy(samples), world.device))  # a loss may write into it
            except Exception as error:
                tried = f"step {step} was tried on {rows(samples)} samples"
                error.add_note(f"while {tried}; PhaseStrategy(check=False) leaves that out")
                # A game may refuse a number of samples. Later trials have one that training has not.
                refused = isinstance(error, UserError) and (not alone if self.whole else not step)
                if refused or isinstance(error, RanksDiffer) or of_a_collective(error):  # another rank may be gone
                    raise
                if not trial.meet(f"cannot play: {error}", PATIENCE):
                    raise
                raise TooFew(
                    f"{tried}, and a loss fails, perhaps because it needs or remembers a larger batch: {error}"
                ) from error
            trial.meet("has ended the step")
            trial.state, trial.kept = self.kept.written(), self.kept.kept()
        return trial

    def compare(self, own: Any, samples: Any) -> tuple[Trial, dict[str, str]]:
        """Try the step with all ranks together, and with each alone. Returns the first trial, and what differs.

        What differs on one rank is returned on all of them.
        """
        training, gather = self.training, self.training.world.gather
        together, alone = self(own), self(samples, alone=True)
        if training.draws.learn(gather((together.drawn, alone.drawn))):
            together, alone = self(own), self(samples, alone=True)
        together.unlike = {name for each in gather(together.unlike) for name in each}
        learners = [policy for policy in training.policies.values() if policy.requiring_grad]
        dtypes = together.dtypes | {weight.dtype for policy in learners for weight in policy.requiring_grad.values()}
        rounding = max(ROUNDING.get(dtype, COARSE) for dtype in dtypes)
        losses, repeated = gather(together.losses), gather(alone.losses)
        comparison = Comparison(losses, repeated, together, alone, rounding, together.unlike)
        first, *others = gather(comparison.kept())
        alike = [name for name in first if all(first[name].equal(each.get(name, first[name])) for each in others)]
        together.own = sorted({re.sub(r"(\.\d+)+$", "", name) for name in alike})  # without the numbers of items
        lines = comparison.lines({})
        if any(gather(bool(lines))):
            with Casts() as casts, OwnCollectives(together.collectives.add):
                shaken = [self(samples, alone=True, shake=number + 1) for number in range(SHAKES)]
            dtypes |= {dtype for each in gather(casts.dtypes) for dtype in each}
            coarser = replace(comparison, rounding=max(ROUNDING.get(dtype, COARSE) for dtype in dtypes))
            lines = coarser.lines(moved(alone, shaken))
        return together, dict(line for each in gather(lines) for line in each.items())

    def compare_answers(self, ready: Callable[[Phase], bool]) -> None:
        """Warn of a `when` that ranks answer in different ways."""
        step = self.game.step
        for phase in self.game.phases:
            if phase.when is None or not phase.due(step, ready):
                continue
            with self.kept.aside():
                answers = self.training.world.gather(bool(phase.when()))
            if len(set(answers)) > 1:
                rank_zero_warn(
                    f"phase '{phase.name}': in step {step} its `when` is {answers[0]} on the first rank, which "
                    f"decides, and {not answers[0]} on others; let it read what is the same on all ranks, such as "
                    f"gan.ranks.mean(x)"
                )


def _on_cpu(batch: Any) -> Any:
    """The batch without the graph of a loss, which may have asked for gradients of its samples."""
    return apply_to_collection(batch, Tensor, lambda x: x.detach().cpu().requires_grad_(x.requires_grad))


def _together(game: GanModule, training: Training) -> int:
    """A trial has so many samples on each rank, or a multiple."""
    together = math.lcm(*(phase.micro_batches for phase in game.phases))
    return together * math.lcm(*(rows_together(policy.player.module) for policy in training.policies.values()))


def _dealt(game: GanModule, training: Training, batch: Any) -> tuple[Any, Any] | None:
    """This rank's part of the first rank's samples, and these samples; None if there are too few for all ranks."""
    world = training.world
    try:
        first = world.broadcast(_on_cpu(batch))
        count = rows(first) // (world.size * (together := _together(game, training))) * world.size * together
        samples = first_rows(first, count)
        return (deal_batch(samples, world.rank, world.size), samples) if count else None
    except UserError:
        return None


def _samples(game: GanModule, training: Training, batch: Any, most: bool = False) -> Any:
    """The first samples of this rank's batch, on the CPU: a few, or as many as one device has room for from all ranks.

    None, with a warning, if there can be no trial.
    """
    together = _together(game, training)
    try:
        own_rows = rows(batch)
        room = ROOM.get(training.world.device.type, 1) * own_rows // training.world.size
        few = together * max(1, min(own_rows if most else SAMPLES, own_rows, room) // together)
        samples = f"{few * training.world.size} samples, {few} of each rank"
        why = f"which may have no memory for {samples}; check it once on fewer ranks"
        counts = range(few, min(own_rows, room) + 1, together)
        # A loss may keep what it made in an earlier step for as many samples as training has.
        for count in sorted(counts, key=lambda count: game.step and own_rows in (count, count * training.world.size)):
            own = _on_cpu(first_rows(batch, count))
            try:
                first_rows(own, count)
                return own
            except UserError as error:  # so few may look like something else: two rows in each item of a pair
                why = f"because its first samples cannot be cut: {error}"
    except UserError as error:
        why = f"because its batch cannot be cut: {error}"
    rank_zero_warn(f"the first step is not checked against one device, {why}")
    return None


@torch.no_grad()
def shake_weights(policies: Iterable[Policy], seed: int) -> None:
    """Change each learning weight by about its last two bits, up or down, alike on all ranks that have it."""
    for policy in policies:
        if policy.package is not None:  # its engine keeps copies of the weights
            continue
        policy.storage.keep_writes()
        for number, weight in enumerate(policy.storage.owned.values()):
            dice = torch.Generator().manual_seed(1000 * seed + number)
            sign = torch.randint(0, 2, weight.shape, generator=dice) * 2 - 1
            weight.mul_(1 + 4 * torch.finfo(weight.dtype).eps * sign.to(weight))
        policy.storage.shards_changed()
        policy.storage.reshard()


def moved(one: Trial, shaken: Sequence[Trial]) -> dict[tuple[str, ...], float]:
    """How far rounding alone moves each number and each tensor of a trial."""
    found: dict[tuple[str, ...], float] = {}
    for other in shaken:
        gaps = {key: abs(number - one.numbers[key]) for key, number in other.numbers.items() if key in one.numbers}
        gaps |= {("state", name): gap_of(tensor, one.state.get(name)) for name, tensor in other.state.items()}
        found |= {key: max(gap, found.get(key, 0.0)) for key, gap in gaps.items() if math.isfinite(gap)}
    return found


def gap_of(one: Tensor | None, other: Tensor | None) -> float:
    """The largest difference of an element."""
    if one is None or other is None or one.shape != other.shape:
        return math.inf
    return (one.double() - other.double()).abs().max().item() if one.numel() else 0.0


class TooFew(Exception):
    """A loss fails on the samples of a trial, on all ranks. It may need more, or remember an earlier batch."""


@dataclass(frozen=True)
class Comparison:
    """What the ranks together gave, and what each of them gave alone with the samples of all.

    [Note: rounding is measured]
    Some numbers are made of rounding alone: the gradient of a bias before a norm is a sum that cancels. So where a
    number differs by more than a part of its size, the step is tried alone three times more, each time with the last
    bits of the weights changed, and with another factor of the loss, so that all is rounded otherwise. A number may
    differ by SPREAD times what that has moved it.
    """

    losses: Sequence[Mapping[tuple[str, str], float]]  # of each rank, in the trial of all together
    repeated: Sequence[Mapping[tuple[str, str], float]]  # of each rank alone: the same samples on each
    together: Trial
    alone: Trial
    rounding: float
    unlike: set[str]  # phases that cannot be compared

    def lines(self, moved: Mapping[tuple[str, ...], float]) -> dict[str, str]:
        """What differs by more than rounding, with what to do. `moved` is how far rounding moves each number."""
        allowed = {key: SPREAD * gap for key, gap in moved.items()}
        return self._losses(allowed) | self._gradients(allowed) | self._states(allowed)

    def kept(self) -> dict[str, Tensor]:
        """What losses keep with other values than one device would. What has a row for each sample has other shapes."""
        many, one = self.together.kept, self.alone.kept
        names = (name for name in self._apart(many, one, {}) if name in many and name in one)
        return {name: one[name] for name in names if many[name].shape == one[name].shape}

    def _states(self, allowed: Mapping[tuple[str, ...], float]) -> dict[str, str]:
        """One line for all: a wrong sample changes every batch norm after it."""
        first, *more = self._apart(self.together.state, self.alone.state, allowed) or [""]
        others = f", and so are {len(more)} others" if more else ""
        text = f"{first} is written in a loss or forward, with other values than by one device{others}"
        return {text: THE_SAME_ON_ALL_RANKS} if first else {}

    def _apart(
        self, many: Mapping[str, Tensor], one: Mapping[str, Tensor], allowed: Mapping[tuple[str, ...], float]
    ) -> list[str]:
        found = []
        for name in () if self.unlike else sorted(many.keys() | one.keys()):
            both = [each[name].double() for each in (many, one) if name in each and each[name].numel()]
            size = max((each.abs().max().item() for each in both), default=0.0)
            gap = gap_of(many.get(name), one.get(name))
            if not gap <= max(self.rounding * size, allowed.get(("state", name), 0.0)):
                found.append(name)
        return found

    def _losses(self, allowed: Mapping[tuple[str, ...], float]) -> dict[str, str]:
        found = {}
        for (phase, name), single in self.repeated[0].items():
            each = [rank[phase, name] for rank in self.losses if (phase, name) in rank]
            same = [rank.get((phase, name), math.nan) for rank in self.repeated]
            mean, room = sum(each) / len(each) if each else math.nan, allowed.get(("loss", phase, name), 0.0)
            if phase in self.unlike:
                continue
            if _apart(max(same), min(same), room):
                text = f"is {max(same):.9g} on one rank and {min(same):.9g} on another, for the same samples"
                found[f"phase '{phase}': loss '{name}' {text}"] = REMEMBERED
                continue
            size = max(abs(mean), abs(single))
            if _apart(mean, single, max(self.rounding * size, min(room, SMALL * max(size, SMALL_LOSS)))):
                found[f"phase '{phase}': loss '{name}' is {both(mean, single)}"] = A_MEAN_OVER_SAMPLES
        return found

    def _gradients(self, allowed: Mapping[tuple[str, ...], float]) -> dict[str, str]:
        """One line for each phase and learner, with the weight that differs most."""
        found = {}
        for (phase, player), one in self.alone.norms.items():
            many = self.together.norms[phase, player]
            largest = max([*one.values(), *many.values()], default=0.0)
            small, least = SMALL * largest, LEAST * self.rounding * largest
            measured = {key[-1]: gap for key, gap in allowed.items() if key[:-1] == ("gradient", phase, player)}
            pairs = {weight: (many.get(weight, 0.0), one.get(weight, 0.0)) for weight in one | many}
            apart = {
                weight: pair
                for weight, pair in pairs.items()
                if _apart(*pair, max(least, self.rounding * max(pair), min(small, measured.get(weight, 0.0))))
            }
            if apart and phase not in self.unlike:
                worst = max(apart, key=lambda weight: abs(apart[weight][0] - apart[weight][1]))
                found[
                    f"phase '{phase}', player '{player}': the gradients of {len(apart)} of {len(pairs)} weights; that "
                    f"of '{worst}' has norm {both(*apart[worst])}"
                ] = A_MEAN_OVER_SAMPLES
        return found


def both(many: float, one: float) -> str:
    """Two numbers, in so many digits that they differ."""
    digits = next((digits for digits in (6, 9, 12) if f"{many:.{digits}g}" != f"{one:.{digits}g}"), 17)
    return f"{many:.{digits}g}, on one device {one:.{digits}g}"


def _apart(one: float, other: float, room: float) -> bool:
    """Whether two numbers differ by more. Two that are not finite are equal: the guard sees to them."""
    if not (math.isfinite(one) or math.isfinite(other)):
        return False
    return not abs(one - other) <= room


def _kept_otherwise(trial: Trial) -> str:
    return f"other values in {', '.join(map(repr, trial.own))} than one device would"


def _said(lines: Mapping[str, str], which: str, training: Training, step: int, trial: Trial) -> str:
    """The error: what differs, and what to type."""
    draws = {draw.name for of_phase in trial.drawn.values() for draw in of_phase.values()}
    given = {name for name in draws if name.endswith(BY_GENERATOR)}
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    listed = "".join(f"\n  - {text}" for text in [*list(lines)[:SHOWN], *more])
    advice = [*dict.fromkeys(lines.values()), *[DRAWS] * bool(draws - given), *[DRAWS_BY_GENERATOR] * bool(given)]
    if trial.drawn_alike:
        advice.insert(0, DRAWS_ALIKE)
    if trial.collectives:
        where = min(trial.collectives)
        advice.insert(0, f"{where} calls torch.distributed, in the trial of one device too. {WORDS}")
    if any(unsynchronised(policy.player.module) for policy in training.policies.values()):
        advice.insert(0, "Synchronise batch norms: Trainer(sync_batchnorm=True).")
    if trial.own:
        advice.append(f"A loss also keeps {_kept_otherwise(trial)}.")
    before = " Weights and checkpoints may differ since the trial before this one, so begin again." if step else ""
    return (
        f"{training.world.size} ranks would not train as one device does. In a trial of step {step}, on {which} "
        f"samples of each rank, these differ:{listed}\n{' '.join(advice)}{before} To train all the same, type "
        f"PhaseStrategy(check=False), or --check false under gan.fit"
    )
