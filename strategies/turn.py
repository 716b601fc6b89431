"""One phase, from its losses to the updates of its learners: the same for every policy."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from gan import later, noise
from gan.files.errors import UserError
from gan.module import GanModule
from gan.phase import Phase
from strategies.batches.draws import Draws, for_all_ranks
from strategies.batches.micro_batches import Batches
from strategies.guard import Guard
from strategies.hooks import NO_HOOKS, Hooks, refuse_partial_gradients, see_gradients
from strategies.options.compile import played
from strategies.policies.policy import Policy
from strategies.processes.same_on_ranks import SameOnRanks
from strategies.sharding.unshard_on_read import other_order
from strategies.turn_errors import check_learns, explained_backward, explained_loss, named_losses, refuse_own_backward
from strategies.world import World, agree


@dataclass(frozen=True)
class Training:
    """What all phases of a training have in common."""

    game: GanModule
    policies: Mapping[str, Policy]
    precision: Precision
    world: World
    seed: int = 0  # with the rank and the step it gives each sample its noise
    hooks: Hooks = NO_HOOKS  # Lightning's, of the game and of callbacks
    same_on_ranks: SameOnRanks = field(default_factory=SameOnRanks)
    guard: Guard = field(default_factory=Guard)
    draws: Draws = field(default_factory=Draws)
    batches: Batches = field(default_factory=Batches)
    checked: bool = False  # whether what should be the same on all ranks is compared

    @property
    def in_stages(self) -> bool:
        """Whether layers of some network are on the rank of their stage alone."""
        return any(policy.in_stages for policy in self.policies.values())


def play(phase: Phase, batch: Any, step: int, training: Training) -> dict[str, Tensor]:
    """Losses, gradients, one update of each learner. Returns the losses and the norms of gradients, by name."""
    learners = [training.policies[name] for name in phase.learners]
    scale = min((learner.loss_scale.scale for learner in learners if learner.loss_scale), default=1.0)
    found: dict[str, Tensor] = {}

    with later.together(), ready(phase, training.policies):
        losses = gradients(phase, batch, step, training, scale)

        # Wait for the device. Nothing else in a phase does. See [Note: one wait a phase].
        finished = finish(phase, training.policies, scale)
        training.same_on_ranks.check(phase.name, step)

        if "on_before_optimizer_step" in training.hooks.wanted:
            seed = training.seed, step
            norms = see_gradients(learners, phase, training.hooks, training.world, training.checked, seed)
            finished = [(each, each.tolist()) for each in norms]

        with for_all_ranks(training.seed, step, phase.name, "update"):
            wanted = phase.update is None or training.world.answer(phase.update)

        # Update weights. A player whose gradients are not finite skips this update, on all ranks together.
        for learner, (norms, values) in zip(learners, finished, strict=True):
            with for_all_ranks(training.seed, step, phase.name, learner.player.name):  # as what `after` draws
                norm = torch.linalg.vector_norm(norms)
                finite = all(map(math.isfinite, values))
                if finite and wanted:
                    learner.update(norm)
            if learner.loss_scale is not None:
                learner.loss_scale.update(finite)
            training.guard.saw(phase, learner, finite, losses, step, training.world)
            training.hooks.call("on_before_zero_grad", learner.optimizer)
            learner.reduction.drop()
            found[f"{phase.name}/{learner.player.name}_grad_norm"] = norm

    return found | {f"{phase.name}/{name}": loss for name, loss in losses.items()}


@contextmanager
def ready(phase: Phase, policies: Mapping[str, Policy], trying: bool = False) -> Iterator[None]:
    """Inside the `with`, the phase may be played. `trying`: for a trial, on a few samples."""
    # No gradient of an earlier phase remains.
    for name in phase.learners:
        policies[name].reduction.drop()

    with ExitStack() as stack:
        # A compiled player cannot be differentiated twice; then torch's error is explained.
        if compiled := [name for name, policy in policies.items() if policy.compiled or policy.compiled_by_author]:
            stack.enter_context(played(phase, compiled, any(policy.compiled_by_author for policy in policies.values())))

        # Only the learners require gradients. Weights are whole when they are read, also those of other players.
        for policy in policies.values():
            stack.enter_context(policy.during(phase, trying))
        yield


def gradients(phase: Phase, batch: Any, step: int, training: Training, scale: float = 1.0) -> dict[str, Tensor]:
    """Give each learner its gradients, for `finish`. Returns the losses, by name."""
    learners = [training.policies[name] for name in phase.learners]
    try:
        counts, parts = training.batches.row_counts(batch), phase.micro_batches
    except UserError:  # one device need not cut a batch, so there anything may be one
        if training.world.size > 1 or phase.micro_batches > 1:
            raise
        counts, parts = [1], 1
    means: dict[str, Tensor] = {}
    in_stages = training.in_stages
    training.draws.begin(phase)

    # Accumulate gradients. Only during the last backward may a policy begin to reduce them.
    for index, part in enumerate(training.batches.parts(batch, counts[0], parts, phase.name)):
        place = _place(phase, counts, index, step, training)
        losses = _losses(phase, part, place, training)
        if index == 0 and training.world.size > 1:
            for learner in learners:
                learner.switch.refuse_new(step)
            refuse_own_backward(phase, learners)
        if training.checked:
            training.same_on_ranks.saw(phase.name, losses, training.draws.guesses(phase))
            training.same_on_ranks.drew(f"phase '{phase.name}'", index, drawn_at(place, training))
        total = _sum(losses.values(), scale / parts)
        for name, loss in losses.items():
            mean = loss.detach().as_subclass(Tensor)  # what an author's subclass of tensors makes is of that class
            mean = mean / parts if parts > 1 else mean
            means[name] = means[name] + mean if name in means else mean
        check_learns(phase, total, in_stages)
        for learner in learners:
            total = learner.reduction.arm(total, last=index == parts - 1)
        training.hooks.call("on_before_backward", total)
        with explained_backward(phase, in_stages):
            total.backward()
        if "on_after_backward" in training.hooks.wanted:
            with refuse_partial_gradients(learners, index == parts - 1, training.world):
                training.hooks.call("on_after_backward")
    return means


def finish(phase: Phase, policies: Mapping[str, Policy], scale: float) -> list[tuple[Tensor, list[float]]]:
    """Complete the learners' gradients. Returns the norms of each learner's, and their values.

    [Note: one wait a phase]
    Whether a learner is updated is decided here, by the CPU, which waits for the gradients of all learners once. What
    it must know beside the norms is read together with them: see gan/later.py. It cannot decide one step later, as with
    those optimizers of torch that skip an update on the device: an author's optimizer, schedule or `after` may be any
    code, and what it has done by then could not be taken back.
    """
    check_that_ranks_agree(phase, policies)
    learners = [policies[name] for name in phase.learners]
    found: list[tuple[Tensor, list[float]]] = []
    for learner in learners:
        norms, values = learner.reduction.finish(scale), []
        later.read(norms, values.extend)
        learner.reduction.ask_reached(phase.name)
        found.append((norms, values))
    later.now()
    for learner, (_, values) in zip(learners, found, strict=True):
        learner.reduction.saw(phase.name, values)
    return found


@contextmanager
def all_learning(policies: Mapping[str, Policy], second_order: bool = False) -> Iterator[None]:
    """Inside the `with`, all that can learn require gradients; with `second_order`, compiled players run eagerly."""
    with ExitStack() as stack:
        for policy in policies.values():
            stack.enter_context(policy.for_several_phases())
            stack.callback(policy.switch.turn, policy.switch.on)
            policy.switch.turn(not policy.player.frozen)
            if second_order and policy.compiled is not None:
                stack.callback(policy.compiled.use, policy.compiled.used)
                policy.compiled.use(False)
        yield


def _losses(phase: Phase, part: Any, place: noise.Place, training: Training) -> dict[str, Tensor]:
    """The named losses of one micro-batch, in the run's precision."""
    with explained_loss(phase, training.policies), noise.at(place), training.precision.forward_context():
        losses = phase.loss(part)
    return named_losses(phase, losses)


def drawn_at(place: noise.Place, training: Training) -> list[object]:
    """What a loss has drawn, in order. Of draws in stages the rank of another stage knows only that they were.

    A draw without a row for each sample has one shape on all ranks. Others may be as long as the rank's samples are.
    """
    unknown = None if training.in_stages else "gan.noise"
    every = map(place.drawn.get, range(place.calls))
    return [unknown if each is None else (each.name, _form(each.shape, place.rows), *each.site) for each in every]


def _form(shape: Sequence[int], rows: int) -> object:
    return len(shape) if any(size % rows == 0 for size in shape) else tuple(shape)


def _place(phase: Phase, counts: Sequence[int], index: int, step: int, training: Training) -> noise.Place:
    """The place of micro-batch `index` of a batch with so many rows. See [Note: every k-th row] in micro_batches.py."""
    parts, draws, world = phase.micro_batches, training.draws.of(phase), training.world
    rows, *others = dict.fromkeys(max(1, count // parts) for count in counts)
    first = {count: world.rank * count * parts + index for count in others}
    key, total = (training.seed, step, phase.name), world.size * parts * rows
    return noise.Place(key, world.rank * rows * parts + index, rows, total, parts, first, **draws)


def _sum(losses: Iterable[Tensor], factor: float) -> Tensor:
    """Their sum times a factor. It never adds 0 or multiplies by 1: in a small game that costs as much as a layer."""
    first, *others = losses
    for loss in others:
        first = first + loss
    return first if factor == 1 else first * factor


def check_that_ranks_agree(phase: Phase, policies: Mapping[str, Policy]) -> None:
    """Raise if ranks gathered buckets in different orders, because then they have gathered wrong values."""
    orders = {name: each.on_read.order for name, each in policies.items() if each.on_read and each.on_read.piecewise}
    if not orders:
        return

    def told(alike: list[float]) -> None:
        if not all(alike):
            raise UserError(other_order(phase.name, *(policies[name].name for name in orders)))

    later.read(agree(orders, next(iter(policies.values())).world.device), told)
