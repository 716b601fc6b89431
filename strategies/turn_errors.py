"""What a phase's loss and its backward may not do: torch's errors in words that say what to type."""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from gan.files.errors import UserError, explained
from gan.phase import Losses, Phase
from strategies import private
from strategies.advice import type_instead
from strategies.options.recompute import Recompute
from strategies.policies.policy import Policy

NO_VALUE = "its loss has no value on this rank, because it uses what a layer of a pipeline has left elsewhere"
LEFT_ELSEWHERE = (
    "What a layer or its hook leaves in an object is on the rank of the layer only: let the network's forward return "
    "it, or type another policy, such as zero3, for the network"
)
IN_CHUNKS = (
    "Under policy pipeline each chunk of the samples has a forward, and the backwards come after all: where a forward "
    "writes its own weights, type +chunks:1. "
)


@contextmanager
def explained_loss(phase: Phase, policies: Mapping[str, Policy]) -> Iterator[None]:
    """Inside the `with`, the phase's loss is computed."""
    try:
        with explained_again(phase):
            yield
    except AttributeError as error:
        for name, policy in policies.items():
            if policy.in_stages and any(map(private.module_hooks, policy.player.module.modules())):
                error.add_note(f"player '{name}' has layers with forward hooks. {LEFT_ELSEWHERE}")
        raise
    except RuntimeError as error:
        for name in _raised_by(error, policies) if "type" in str(error) else ():
            if "bf16" in policies[name].options:
                error.add_note(
                    f"player '{name}' has the option bf16, with which its layers read their weights in bfloat16, and "
                    f"not every kernel takes that, such as that of spectral_norm on CPUs; type "
                    f"{type_instead(name, without='bf16')}"
                )
        if "is sharded: its values" in str(error):  # torch.compile has wrapped a UserError
            raise UserError(
                f"phase '{phase.name}': its loss is compiled as one function, and no rank has all weights of the "
                f"networks called inside; call them outside of the compiled function, or type --strategy zero2"
            ) from None  # torch's is pages long
        if "on device meta " in str(error) and any(policy.in_stages for policy in policies.values()):
            raise UserError(f"phase '{phase.name}': {NO_VALUE}. {LEFT_ELSEWHERE}") from error
        if "not require grad" not in str(error):
            raise
        raise UserError(
            f"phase '{phase.name}': {error}; in this phase only the weights of {', '.join(phase.learners)} require "
            f"gradients, so type x.requires_grad_() for what the loss differentiates by, and let it learn inside, as "
            f"an unrolled GAN does, on weight.detach().clone().requires_grad_(), by torch.func.functional_call"
        ) from error


def _raised_by(error: Exception, policies: Mapping[str, Policy]) -> list[str]:
    """The player of the layer that has raised the error, or all players where no layer has."""
    owners = {id(module): name for name, policy in policies.items() for module in policy.player.module.modules()}
    frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    return [owners[id(each)] for each in frames if id(each) in owners][-1:] or list(policies)


def named_losses(phase: Phase, losses: Losses) -> dict[str, Tensor]:
    """What a phase's loss has returned, by name, if these are scalars."""
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


def check_learns(phase: Phase, total: Tensor, in_stages: bool) -> None:
    """Refuse a loss that has no value on this rank, or no gradient."""
    if total.is_meta and in_stages:
        raise UserError(f"phase '{phase.name}': {NO_VALUE}. {LEFT_ELSEWHERE}")
    if not total.requires_grad:
        raise UserError(
            f"phase '{phase.name}': its loss depends on no weight of {', '.join(phase.learners)}; "
            f"is something detached, frozen, or computed under no_grad, made in the turn of another phase (see "
            f"self.shared), does it call backward() itself, or does no sample of this rank count? Then let it "
            f"return 0 * net(x).sum(), with a learner's network"
        )


@contextmanager
def explained_backward(phase: Phase, in_stages: bool) -> Iterator[None]:
    """Inside the `with`, the backward of the phase's loss runs."""
    written = explained(
        f"phase '{phase.name}': what its loss was computed from is written before its backward. If the loss does "
        f"that, as by label.fill_(0), take a new tensor there: backward comes after all losses of a phase. If "
        f"another phase has updated a network since, call it again. {IN_CHUNKS * in_stages}{{why}}",
        RuntimeError,
        saying="modified by an inplace operation",
    )
    block = Recompute.latest[1]
    kept = f"; if a hook in {block} fills a list, empty that list before each forward, for the block runs twice"
    again = explained(
        f"phase '{phase.name}': backward goes a second time through its loss; let the loss not call backward() "
        f"itself, compute again what another phase has computed and learned from, and take no "
        f"parametrize.cached() around calls of a pipeline{kept * bool(block)}",
        RuntimeError,
        saying="backward through the graph a second time",
    )
    with written, again, explained_again(phase):
        yield


@contextmanager
def explained_again(phase: Phase) -> Iterator[None]:
    """Inside the `with`, torch may find that a block has not computed again what it has computed before."""
    try:
        yield
    except CheckpointError:
        player, block = Recompute.latest
        if not player:  # a checkpoint of the author's own
            raise
        raise UserError(
            f"phase '{phase.name}': {block} has computed something else when backward ran it again, as where the "
            f"loss or the network exchanges a layer of a block for one call, or calls it inside parametrize.cached(); "
            f"type {type_instead(player, without='recompute')}"
        ) from None  # torch's is of what a checkpoint saves


def refuse_own_backward(phase: Phase, learners: Sequence[Policy]) -> None:
    """Policies reduce what the one backward gives that follows the loss."""
    weights = [weight for learner in learners for weight in learner.belongings.parameters.values()]
    if any(weight.grad is not None for weight in weights):
        raise UserError(
            f"phase '{phase.name}': its loss calls backward() itself, whose gradients would stay each rank's own; let "
            f"it return what it learns from, such as {{'real': ..., 'fake': ...}}, which are added up"
        )
