"""One phase, from its losses to the updates of its learners: the same for every policy."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from gan import later, noise
from gan.files.errors import UserError, explained
from gan.module import GanModule
from gan.phase import Losses, Phase
from strategies import private
from strategies.advice import type_instead
from strategies.batches.draws import Draws, for_all_ranks
from strategies.batches.micro_batches import Batches
from strategies.hooks import NO_HOOKS, Hooks, refuse_partial_gradients, see_gradients
from strategies.options.compile import played
from strategies.policies.policy import Policy
from strategies.processes.same_on_ranks import SameOnRanks
from strategies.sharding.unshard_on_read import other_order
from strategies.world import World, agree

NO_VALUE = "its loss has no value on this rank, because it uses what a layer of a pipeline has left elsewhere"
LEFT_ELSEWHERE = (
    "What a layer or its hook leaves in an object is on the rank of the layer only: let the network's forward return "
    "it, or type another policy, such as zero3, for the network"
)
IN_CHUNKS = (
    "Under policy pipeline each chunk of the samples has a forward, and the backwards come after all: where a forward "
    "writes its own weights, type +chunks:1. "
)

PATIENCE = 10  # updates that the guard lets go


class NothingLearned(UserError):
    """The run does not learn any more, so it ends. Every rank raises this together."""

    agreed = True


class Guard:
    """Counts skipped updates, warns about them, and ends a run that no longer learns.

    One bad batch costs only one update. But a phase does not recover if its loss is not finite the first time it is
    played, or if its learner has skipped `PATIENCE` updates in a row. Then the run stops at the start of the next
    step, so that a checkpoint can be saved after this one. As long as the loss scale is still falling, the guard waits.
    """

    def __init__(self) -> None:
        self.in_a_row: dict[tuple[str, str], int] = {}
        self.verdict: str | None = None  # with which the run stops before its next step

    def saw(
        self, phase: Phase, learner: Policy, finite: bool, losses: dict[str, Tensor], step: int, world: World
    ) -> None:
        """Count one update, done or skipped. `finite` is the same on every rank."""
        key = (phase.name, learner.player.name)
        first = key not in self.in_a_row
        self.in_a_row[key] = many = 0 if finite else self.in_a_row.get(key, 0) + 1
        if finite:
            return
        learner.skipped += 1
        bad = {name: loss.item() for name, loss in losses.items() if not torch.isfinite(loss)}
        said = [f"the loss is {each}" if name == "loss" else f"loss '{name}' is {each}" for name, each in bad.items()]
        cause = sorted({text for texts in world.gather(said) for text in texts})
        what = ", ".join(cause) if cause else "the losses are finite, a gradient is not"
        rank_zero_warn(
            f"step {step}, phase '{phase.name}': {what}; skipped the update of '{key[1]}' on all ranks "
            f"({learner.skipped} so far)"
        )
        scale_falls = learner.loss_scale is not None and learner.loss_scale.scale >= 1
        if not scale_falls and ((first and cause) or many >= PATIENCE):
            skipped = "the update" if many == 1 else f"{many} updates in a row"
            self.verdict = (
                f"phase '{phase.name}' does not learn: at step {step}, {what}; skipped {skipped} of '{key[1]}'; the "
                f"weights are as before. Try a lower learning rate, clip=1.0, or --debug to find the operation"
            )

    def raise_if_hopeless(self) -> None:
        if self.verdict is not None:
            raise NothingLearned(self.verdict)


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
    training.draws.begin(phase)

    # Accumulate gradients. Only during the last backward may a policy begin to reduce them.
    for index, part in enumerate(training.batches.parts(batch, counts[0], parts, phase.name)):
        place = _place(phase, counts, index, step, training)
        losses = _losses(phase, part, place, training)
        if index == 0 and training.world.size > 1:
            for learner in learners:
                learner.switch.refuse_new(step)
            _refuse_own_backward(phase, learners)
        if training.checked:
            training.same_on_ranks.saw(phase.name, losses, training.draws.guesses(phase))
            training.same_on_ranks.drew(f"phase '{phase.name}'", index, drawn_at(place, training))
        total = _sum(losses.values(), scale / parts)
        for name, loss in losses.items():
            mean = loss.detach().as_subclass(Tensor)  # what an author's subclass of tensors makes is of that class
            mean = mean / parts if parts > 1 else mean
            means[name] = means[name] + mean if name in means else mean
        if total.is_meta and training.in_stages:
            raise UserError(f"phase '{phase.name}': {NO_VALUE}. {LEFT_ELSEWHERE}")
        if not total.requires_grad:
            raise UserError(
                f"phase '{phase.name}': its loss depends on no weight of {', '.join(phase.learners)}; "
                f"is something detached, frozen, or computed under no_grad, made in the turn of another phase (see "
                f"self.shared), does it call backward() itself, or does no sample of this rank count? Then let it "
                f"return 0 * net(x).sum(), with a learner's network"
            )
        for learner in learners:
            total = learner.reduction.arm(total, last=index == parts - 1)
        training.hooks.call("on_before_backward", total)
        written = explained(
            f"phase '{phase.name}': what its loss was computed from is written before its backward. If the loss does "
            f"that, as by label.fill_(0), take a new tensor there: backward comes after all losses of a phase. If "
            f"another phase has updated a network since, call it again. {IN_CHUNKS * training.in_stages}{{why}}",
            RuntimeError,
            saying="modified by an inplace operation",
        )
        again = explained(
            f"phase '{phase.name}': backward goes a second time through its loss; let the loss not call backward() "
            f"itself, compute again what another phase has computed and learned from, and take no "
            f"parametrize.cached() around calls of a pipeline",
            RuntimeError,
            saying="backward through the graph a second time",
        )
        with written, again:
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
    try:
        with noise.at(place), training.precision.forward_context():
            losses: Losses = phase.loss(part)
    except AttributeError as error:
        for name, policy in training.policies.items():
            if policy.in_stages and any(map(private.module_hooks, policy.player.module.modules())):
                error.add_note(f"player '{name}' has layers with forward hooks. {LEFT_ELSEWHERE}")
        raise
    except RuntimeError as error:
        for name, policy in training.policies.items():
            if "bf16" in policy.options and "type" in str(error):
                error.add_note(
                    f"player '{name}' has the option bf16, with which its layers read their weights in bfloat16, and "
                    f"not every kernel takes that; type {type_instead(name, without='bf16')}"
                )
        if "is sharded: its values" in str(error):  # torch.compile has wrapped a UserError
            raise UserError(
                f"phase '{phase.name}': its loss is compiled as one function, and no rank has all weights of the "
                f"networks called inside; call them outside of the compiled function, or type --strategy zero2"
            ) from None  # torch's is pages long
        if "on device meta " in str(error) and training.in_stages:
            raise UserError(f"phase '{phase.name}': {NO_VALUE}. {LEFT_ELSEWHERE}") from error
        if "not require grad" not in str(error):
            raise
        raise UserError(
            f"phase '{phase.name}': {error}; in this phase only the weights of {', '.join(phase.learners)} require "
            f"gradients, so type x.requires_grad_() for what the loss differentiates by, and let it learn inside, as "
            f"an unrolled GAN does, on weight.detach().clone().requires_grad_(), by torch.func.functional_call"
        ) from error
    named = {"loss": losses} if isinstance(losses, Tensor) else losses
    if not isinstance(named, Mapping) or not named:
        raise UserError(
            f"phase '{phase.name}': its loss must return a scalar or named scalars, got {type(losses).__name__}; to "
            f"leave a turn out, type Phase(..., when=...)"
        )
    for name, loss in named.items():
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UserError(f"phase '{phase.name}': its loss '{name}' is not a scalar tensor; take its mean")
    if "loss" in named and (more := [name for name, each in named.items() if name != "loss" and each.requires_grad]):
        raise UserError(
            f"phase '{phase.name}': it learns from the sum of what it returns, so from '{more[0]}' as well as 'loss'; "
            f"return the loss alone, and self.log(...) what is only looked at; or call no part of a sum 'loss'"
        )
    return {name: loss.reshape(()) if loss.ndim else loss for name, loss in named.items()}


def _refuse_own_backward(phase: Phase, learners: Sequence[Policy]) -> None:
    """Policies reduce what the one backward gives that follows the loss."""
    weights = [weight for learner in learners for weight in learner.belongings.parameters.values()]
    if any(weight.grad is not None for weight in weights):
        raise UserError(
            f"phase '{phase.name}': its loss calls backward() itself, whose gradients would stay each rank's own; let "
            f"it return what it learns from, such as {{'real': ..., 'fake': ...}}, which are added up"
        )


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
