"""The first step is tried twice: by all ranks together, and by each rank as if it were one device. Both must agree.

[Note: the law checks itself]
Any number of ranks must give the training of one device. That is a law for the code of a game too, and a game can
break it: by a statistic of the rank's own samples, a loss that is no mean over samples, a buffer that learns from the
rank's own samples. So, before the first step of a fit, the step is tried on a few samples of each rank. First each
rank plays it with its own samples, as it will in training. Then each rank plays it with the samples of all ranks, as
one device would. Gradients are reduced as in training, because then no weight must be whole anywhere, but nothing is
updated. Losses, the norm of each weight's gradient, buffers and weights must be equal. Then all is put back: buffers,
weights, random states, attributes of modules.

What differs only later, such as a mask that is full in the first batch, is found when later steps are tried too
(`PhaseStrategy(check="often")`).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gan.errors import UserError
from gan.module import GanModule
from nets.norm import unsynchronised
from strategies.check.kept import Kept
from strategies.check.trial import Different, Trial, Tried
from strategies.micro_batches import first_rows, join_batches, rows
from strategies.turn import PhaseContext

SAMPLES = 2  # of each rank, at least
ROOM = {"cpu": 4}  # a device may get so many times its own batch; a GPU once, because it may have no more memory
SHOWN = 6  # differences in the error

# Two numbers are equal if they differ by less than this part of their size: sums in another order are rounded anew.
ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-3}
COARSE = 5e-2  # for bfloat16 and float16
SMALL_NORM, SMALL_BUFFER = 1e-2, 1e-2  # smaller ones are compared as if they had this size: they may be noise

THE_SAME_ON_ALL_RANKS = "Write what is the same on all ranks: gan.ranks.mean(x) or gan.ranks.sum(x) in place of x."
A_MEAN_OVER_SAMPLES = (
    "A loss must be a mean over samples. Where it needs a number of the whole batch, take gan.ranks.mean(x), "
    "gan.ranks.sum(x) or gan.ranks.gather(x)."
)


def check_step(
    games: Sequence[GanModule],
    context: PhaseContext,
    batch: Any,
    trying: Callable[[Trial, Any], None],
    gather: Callable[[Any], list[Any]],
) -> None:
    """Raise if the ranks together would not train as one device does.

    `games` are the game and its replicas in this process. `trying(trial, batch)` plays the step for a trial. `gather`
    returns the values of all processes.
    """
    own = _few_samples(games, context, batch)
    if own is None:
        return
    kept = Kept(games, context.policies)

    def tried(samples: Any, alone: bool = False, exchanging: bool = False) -> Tried:
        trial = Trial(gather, context.step, alone, exchanging)
        with kept.aside():
            vars(games[0])["log"] = lambda *_, **__: None
            try:
                trying(trial, samples)
            except Exception as error:
                where = f"while step {context.step} was tried on {rows(samples)} samples"
                error.add_note(f"{where}; PhaseStrategy(check=False) leaves that out")
                raise
            trial.meet("has ended the step")
            trial.tried.state = kept.written()
        return trial.tried

    together = tried(own)
    drew = any(gather(bool(together.unlike)))
    if drew:
        together = tried(own, exchanging=True)
    alone = tried(join_batches(gather(own)), alone=True, exchanging=drew)

    for phase, draw in together.drawn.items():
        rank_zero_warn(
            f"phase '{phase}' draws from torch's own generator ({draw}): on each rank other numbers, and none of them "
            f"are those of one device; gan.noise draws the same on any number of ranks"
        )
    unlike = {name for each in gather(together.unlike) for name in each}
    if unlike:
        rank_zero_warn(
            f"phase {', '.join(map(repr, sorted(unlike)))}: not compared with one device, because it draws from "
            f"Python's or NumPy's random generators, or within attention; draw with gan.noise"
        )
    learners = [policy for policy in context.policies.values() if policy.requiring_grad]
    rounding = max(ROUNDING.get(w.dtype, COARSE) for policy in learners for w in policy.requiring_grad.values())
    gaps = _gaps(together.state, alone.state, rounding) if not unlike else {}
    lines = [
        *_different_state(gather(gaps)),
        *_different_losses(gather(together.losses), alone.losses, rounding, unlike),
        *_different_gradients(together.norms, alone.norms, rounding, unlike),
    ]
    lines = list(dict.fromkeys(line for each in gather(lines) for line in each))  # so that all ranks raise, or none
    if lines:
        raise Different(_said(lines, context))


def _few_samples(games: Sequence[GanModule], context: PhaseContext, batch: Any) -> Any:
    """The first samples of this process's batch, on the CPU; None, with a warning, if there can be no trial."""
    few = math.lcm(*(phase.micro_batches for phase in games[0].phases))
    try:
        own_rows = rows(batch) // len(games)
        few *= max(1, min(SAMPLES, own_rows // context.size) // few)
        room = ROOM.get(next(iter(context.policies.values())).world.device.type, 1) * own_rows
        if few * context.size <= room:
            return move_data_to_device(first_rows(batch, few * len(games)), torch.device("cpu"))
        why = (
            f"which may have no memory for {few} samples of each of {context.size} ranks; check it once on fewer ranks"
        )
    except UserError as error:
        why = f"because its batch cannot be cut: {error}"
    rank_zero_warn(f"the first step is not checked against one device, {why}")
    return None


def _gaps(many: dict[str, Tensor], one: dict[str, Tensor], rounding: float) -> dict[str, float]:
    """For each buffer and weight that differs on this rank: the largest difference."""
    found = {}
    for name in sorted(many.keys() | one.keys()):
        pair = many.get(name), one.get(name)
        if pair[0] is None or pair[1] is None or pair[0].shape != pair[1].shape:
            found[name] = math.inf
        elif not torch.equal(*pair):
            here, there = (tensor.double() for tensor in pair)
            size = max(here.abs().max().item(), there.abs().max().item(), SMALL_BUFFER)
            gap = (here - there).abs().max().item()
            if not gap <= rounding * size:
                found[name] = gap
    return found


def _different_state(gaps: list[dict[str, float]]) -> list[str]:
    names = dict.fromkeys(name for rank in gaps for name in rank)
    largest = {name: max(rank.get(name, 0.0) for rank in gaps) for name in names}
    return [f"{name} is written in a loss or forward, and differs by {gap:.3g}" for name, gap in largest.items()]


def _different_losses(
    many: list[dict[tuple[str, str], float]], one: dict[tuple[str, str], float], rounding: float, unlike: set[str]
) -> list[str]:
    """`many` are the losses of each rank, `one` those of one device."""
    found = []
    for (phase, name), single in one.items():
        each = [rank[phase, name] for rank in many if (phase, name) in rank]
        mean = sum(each) / len(each) if each else math.nan
        if phase not in unlike and _apart(mean, single, sum(map(abs, each)) / max(len(each), 1), rounding):
            found.append(f"phase '{phase}': loss '{name}' is {mean:.6g}, on one device {single:.6g}")
    return found


def _different_gradients(
    many: dict[tuple[str, str], dict[str, float]],
    one: dict[tuple[str, str], dict[str, float]],
    rounding: float,
    unlike: set[str],
) -> list[str]:
    """One line for each phase and learner, with the weight that differs most."""
    found = []
    for (phase, player), single in one.items():
        together = many[phase, player]
        size = SMALL_NORM * max([*single.values(), *together.values()], default=0.0)
        pairs = {weight: (together.get(weight, 0.0), single.get(weight, 0.0)) for weight in single | together}
        apart = {weight: pair for weight, pair in pairs.items() if _apart(*pair, size, rounding)}
        if apart and phase not in unlike:
            worst = max(apart, key=lambda weight: abs(apart[weight][0] - apart[weight][1]))
            found.append(
                f"phase '{phase}', player '{player}': the gradients of {len(apart)} of {len(pairs)} weights; that of "
                f"'{worst}' has norm {apart[worst][0]:.6g}, on one device {apart[worst][1]:.6g}"
            )
    return found


def _apart(many: float, one: float, size: float, rounding: float) -> bool:
    """Whether two numbers differ by more than rounding. Two that are not finite are equal: the guard sees to them."""
    if not (math.isfinite(many) or math.isfinite(one)):
        return False
    return not abs(many - one) <= rounding * max(abs(many), abs(one), size)


def _said(lines: list[str], context: PhaseContext) -> str:
    """The error: what differs, and what to type."""
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    listed = "".join(f"\n  - {text}" for text in [*lines[:SHOWN], *more])
    advice = []
    if any(unsynchronised(policy.player.module) for policy in context.policies.values()):
        advice.append("Synchronise batch norms: Trainer(sync_batchnorm=True).")
    if any("written" in text for text in lines):
        advice.append(THE_SAME_ON_ALL_RANKS)
    if any(text.startswith("phase") for text in lines):
        advice.append(A_MEAN_OVER_SAMPLES)
    return (
        f"{context.size} ranks would not train as one device does. In a trial of step {context.step}, on a few samples "
        f"of each rank, these differ:{listed}\n{' '.join(advice)} To train all the same, type "
        f"PhaseStrategy(check=False), or --check false under gan.fit"
    )
