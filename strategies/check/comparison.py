"""Whether the ranks together gave what each of them gave as one device, and how far rounding may move a number.

[Note: rounding is measured]
Some numbers are made of rounding alone: the gradient of a bias before a norm is a sum that cancels. So where a
number differs by more than a part of its size, the step is tried alone three times more, each time with the last
bits of the weights changed, and with another factor of the loss, so that all is rounded otherwise. A number may
differ by SPREAD times what that has moved it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strategies.check.trial import Trial
from strategies.objects.content import same_numbers
from strategies.policies.policy import Policy

# Two numbers are equal if they differ by less than this part of their size: sums in another order are rounded anew.
# With 2e-5 for float32 StyleGAN2 was refused on CPUs: rounding turns a sign now and then, before a leaky ReLU.
ROUNDING = {torch.float64: 1e-9, torch.float32: 2e-3}
COARSE = 5e-2  # for bfloat16 and float16
# What differs by more is compared with what rounding does to it. See [Note: rounding is measured].
SHAKES, SPREAD = 3, 100.0
# But a gradient of this part of the player's largest, and this part of a loss, are not made of rounding alone: unless
# rounding moves one by as much as the largest is, as where a network and a copy of it cancel.
SMALL = 1e-2
LEAST = 1e-4  # gradients that differ by this part of the rounding of the largest one are equal: sums that cancel
SMALL_LOSS = 1e-3  # smaller losses are taken as if they had this size
OF_BATCH_NORMS = ("running_mean'", "running_var'", "num_batches_tracked'")

THE_SAME_ON_ALL_RANKS = "Write what is the same on all ranks: gan.ranks.mean(x) or gan.ranks.sum(x) in place of x."
REMEMBERED = (
    "What a loss remembers from earlier steps must be the same on all ranks: keep gan.ranks.mean(x), gan.ranks.sum(x) "
    "or gan.ranks.gather(x) in place of x. So must what hooks write to weights: draw for it from a torch.Generator "
    "that is seeded alike on all ranks. And so must what a constructor draws outside of weights and buffers, as a "
    "plain tensor or a number: call seed_everything(0) before the game is made."
)
A_MEAN_OVER_SAMPLES = (
    "A loss must be a mean over samples. Where it needs a number of the whole batch, take gan.ranks.mean(x), "
    "gan.ranks.sum(x) or gan.ranks.gather(x)."
)

REACHED = (
    "A loss must reach the same weights however its samples are dealt out to ranks. If yours does, type another policy "
    "for the player, and report this."
)


Numbers = Mapping[tuple[str, ...], float]  # of losses, gradients and states, by their names


@dataclass(frozen=True)
class Comparison:
    """What the ranks together gave, and what each of them gave alone with the samples of all."""

    losses: Sequence[Mapping[tuple[str, str], float]]  # of each rank, in the trial of all together
    repeated: Sequence[Mapping[tuple[str, str], float]]  # of each rank alone: the same samples on each
    together: Trial
    alone: Trial
    rounding: Mapping[str, float]  # by phase: see `roundings`
    unlike: set[str]  # phases that cannot be compared

    def lines(self, moved: Numbers) -> dict[str, str]:
        """What differs by more than rounding, with what to do. `moved` is how far rounding moves each number."""
        allowed = {key: SPREAD * gap for key, gap in moved.items()}
        return self._losses(allowed) | self._gradients(allowed) | self._states(allowed)

    def remembered(self) -> dict[str, Tensor]:
        """What losses keep with other values than one device would. What has a row for each sample has other shapes."""
        many, one = self.together.remembered, self.alone.remembered
        names = (name for name in self._unlike(many, one, {}) if name in many and name in one)
        return {name: one[name] for name in names if many[name].shape == one[name].shape}

    def _states(self, allowed: Numbers) -> dict[str, str]:
        """One line for all: a wrong sample changes every batch norm after it, so these are named last."""
        apart = self._unlike(self.together.state, self.alone.state, allowed)
        first, *more = sorted(apart, key=lambda name: name.endswith(OF_BATCH_NORMS)) or [""]
        others = f", and {len(more)} more" if more else ""
        text = f"{first} is written in a loss or forward, with other values than by one device{others}"
        return {text: THE_SAME_ON_ALL_RANKS} if first else {}

    def _unlike(self, many: Mapping[str, Tensor], one: Mapping[str, Tensor], allowed: Numbers) -> list[str]:
        found, rounding = [], max(self.rounding.values(), default=0.0)
        for name in () if self.unlike else sorted(many.keys() | one.keys()):
            both = [_real(each[name]).nan_to_num(0, 0, 0) for each in (many, one) if name in each]
            if len(both) == 2 and both[0].shape != both[1].shape and _filled_alike(*both):
                continue  # a gradient to begin with, say, which is made anew for each batch
            size = max((each.abs().max().item() for each in both if each.numel()), default=0.0)
            if not gap_of(many.get(name), one.get(name)) <= max(rounding * size, allowed.get(("state", name), 0.0)):
                found.append(name)
        return found

    def _losses(self, allowed: Numbers) -> dict[str, str]:
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
            size, rounding = max(abs(mean), abs(single)), self.rounding[phase]
            if _apart(mean, single, max(rounding * size, min(room, max(SMALL, rounding) * max(size, SMALL_LOSS)))):
                found[f"phase '{phase}': loss '{name}' is {two_numbers(mean, single)}"] = A_MEAN_OVER_SAMPLES
        return found

    def _gradients(self, allowed: Numbers) -> dict[str, str]:
        """One line for each phase and learner, with the weight that differs most."""
        found = {}
        for (phase, player), one in self.alone.norms.items():
            if phase in self.unlike:
                continue
            many = self.together.norms[phase, player]
            largest = max(filter(math.isfinite, (*one.values(), *many.values())), default=0.0)
            rounding = self.rounding[phase]
            small, least = max(SMALL, rounding) * largest, LEAST * rounding * largest
            measured = {key[-1]: gap for key, gap in allowed.items() if key[:-1] == ("gradient", phase, player)}
            if max(measured.values(), default=0.0) >= SPREAD * largest:
                small = math.inf
            pairs = {weight: (many.get(weight, 0.0), one.get(weight, 0.0)) for weight in one | many}
            apart = {
                weight: pair
                for weight, pair in pairs.items()
                if _apart(*pair, max(least, rounding * max(pair), min(small, measured.get(weight, 0.0))))
            }
            if reached := sorted(one.keys() ^ many.keys()):  # with zeros an optimizer still moves a weight
                where = "on one device only" if reached[0] in one else "by the ranks together only"
                text = f"{len(reached)} of {len(pairs)} weights are reached otherwise: '{reached[0]}' {where}"
                found[f"phase '{phase}', player '{player}': {text}"] = REACHED
            if apart:
                worst = max(apart, key=lambda weight: abs(apart[weight][0] - apart[weight][1]))
                found[
                    f"phase '{phase}', player '{player}': the gradients of {len(apart)} of {len(pairs)} weights; that "
                    f"of '{worst}' has norm {two_numbers(*apart[worst])}"
                ] = A_MEAN_OVER_SAMPLES
        return found


def roundings(*dtypes: Mapping[str, Iterable[torch.dtype]]) -> dict[str, float]:
    """By phase: by which part of its size rounding alone may move a number, where trials computed in these types."""
    found: dict[str, float] = {}
    for phase, each in (item for of_trial in dtypes for item in of_trial.items()):
        found[phase] = max(found.get(phase, 0.0), *(ROUNDING.get(dtype, COARSE) for dtype in each))
    return found


def two_numbers(many: float, one: float) -> str:
    """Two numbers, in so many digits that they differ."""
    digits = next((digits for digits in (6, 9, 12) if f"{many:.{digits}g}" != f"{one:.{digits}g}"), 17)
    return f"{many:.{digits}g}, on one device {one:.{digits}g}"


def _apart(one: float, other: float, room: float) -> bool:
    """Whether two numbers differ by more. Two that are not finite are equal: the guard sees to them."""
    if not (math.isfinite(one) or math.isfinite(other)):
        return False
    return not abs(one - other) <= room


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


def moved_by_rounding(one: Trial, shaken: Sequence[Trial]) -> dict[tuple[str, ...], float]:
    """How far rounding alone moves each number and each tensor of a trial."""
    found: dict[tuple[str, ...], float] = {}
    for other in shaken:
        gaps = {key: abs(number - one.numbers[key]) for key, number in other.numbers.items() if key in one.numbers}
        gaps |= {("state", name): gap_of(tensor, one.state.get(name)) for name, tensor in other.state.items()}
        found |= {key: max(gap, found.get(key, 0.0)) for key, gap in gaps.items() if math.isfinite(gap)}
    return found


def _real(x: Tensor) -> Tensor:
    return (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).double()


def _filled_alike(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers of both are one number."""
    return one.numel() > 0 and bool((one == one.flatten()[0]).all()) and bool((other == one.flatten()[0]).all())


def gap_of(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape:
        return math.inf
    one, other = _real(one), _real(other)
    return torch.where(same_numbers(one, other), 0.0, one - other).abs().max().item() if one.numel() else 0.0
