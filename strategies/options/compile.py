"""The option compile: torch.compile for a player's forward and backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

from gan.files.errors import UserError, explained
from gan.phase import Phase, Player
from strategies.advice import type_instead
from strategies.options.blocks import has_forward

BACKEND = "inductor"
FORGETFUL = torch.__version__ < "2.12"  # it takes a graph that was made for frozen weights when the weights learn
FORGETS = (
    f"torch {torch.__version__} may leave out the gradients of weights that were frozen in another phase "
    f"(pytorch#139476); install torch 2.12"
)
RECOMPILES = 64  # limit for one function. All blocks of a class share it, and each compiles it for each situation.


class Compiled:
    """Compiles the calls of a player's network in place, as `Module.compile` does: the same object and state-dict keys.

    The network's `forward` is compiled, wherever the network is called. Its other methods are not compiled, nor the
    modules that they call. If a network has no forward, for example a ModuleDict of two networks, each module inside
    it that has one is compiled by itself.

    A compiled backward cannot be differentiated. So all players run eagerly in a phase with `second_order=True`. In a
    game with such a phase, the function given to `GanModule.shared` runs eagerly too. If a phase differentiates a
    gradient without this flag, an error says so.

    [Note: how often it compiles]
    torch compiles a function again for each new situation: weights require gradients or not, gradients are recorded or
    not, training or evaluation, another batch size (twice: from the second size on, the size is a variable). So a
    player is compiled during the first steps, once for each situation that occurs in a step, and not after that. If
    the values of weights change, also to their averages and back, it is not compiled again. The same holds if their
    memory changes, as under zero3.

    Communicates nothing. Weights are gathered before the compiled call. A synchronised batch norm's sums over ranks
    and the noise of `gan.noise` stay outside the compiled graphs: each splits a graph in two. What torch draws is
    inside, and the same as in an eager network (see draws.py). The gradients of a graph all arrive at its
    end, so less of their reduction overlaps with backward.
    """

    def __init__(self, player: Player, gather: Callable[[], None]) -> None:
        self.player, self.gather = player, gather
        if FORGETFUL:
            raise UserError(f"player '{player.name}': {FORGETS}, or leave the option compile out")
        self.calls = {module: self._compiled(module) for module in _with_forward(player.module)}
        if not self.calls:
            raise UserError(
                f"player '{player.name}': no module of its {type(player.module).__name__} has a forward to compile; "
                f"leave the option out for it: {type_instead(player.name, without='compile')}"
            )
        self.before = ExitStack()
        for module in self.calls:
            self.before.enter_context(mock.patch.object(module, "_compiled_call_impl", None))
        self.use(True)

    def use(self, compiled: bool) -> None:
        """Let the network run compiled, or eagerly, from now on."""
        self.used = compiled
        for module, call in self.calls.items():
            module._compiled_call_impl = call if compiled else None

    def _compiled(self, module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return module._call_impl(*args, **kwargs)

        # Before torch 2.15 `Module.compile` compiles nothing of a class of torch's own, such as nn.Sequential.
        return partial(self._run, torch.compile(call, backend=BACKEND))

    def _run(self, compiled: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.gather()
        try:
            return compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            inner = getattr(error, "inner_exception", error)
            lines = [line.strip() for line in str(inner).splitlines() if line.strip()]
            cause = lines[0].rstrip(".") if lines else type(inner).__name__  # without torch's pages of advice
            raise UserError(
                f"player '{self.player.name}': torch.compile fails on its {type(self.player.module).__name__}: "
                f"{cause}; leave the option compile out for it: "
                f"{type_instead(self.player.name, without='compile')}"
            ) from error

    def release(self) -> None:
        self.before.close()
        self.calls = {}


def refuse_forgetful(player: Player) -> None:
    """Refuse a network that the game itself has compiled, where torch would silently train a part of it."""
    if FORGETFUL:
        raise UserError(
            f"player '{player.name}': the game compiles its network, and {FORGETS}, or leave torch.compile out of the "
            f"game"
        )


def compiled_by_author(module: nn.Module) -> bool:
    """Whether the game itself has called torch.compile on this module, or its `compile()`."""
    return type(module).__module__.startswith("torch._dynamo") or vars(module).get("_compiled_call_impl") is not None


def refuse_compiled_by_author(player: Player, readers: Sequence[nn.Module], policy: str) -> None:
    """Refuse it where weights are sharded: a graph reads them without a word, so nothing would gather them."""
    if any(isinstance(each, torch.jit.ScriptModule) for each in readers):
        raise UserError(
            f"player '{player.name}': torch.jit.script has compiled a part of its network, and '{policy}' cannot "
            f"gather the weights there; leave torch.jit.script out, or type {type_instead(player.name, 'zero2')}"
        )
    if any(map(compiled_by_author, readers)):
        raise UserError(
            f"player '{player.name}': the game compiles its network, and '{policy}' must gather the weights before "
            f"each compiled call; leave torch.compile out of the game and type "
            f"{type_instead(player.name, 'zero3+compile')}"
        )


def _with_forward(module: nn.Module) -> list[nn.Module]:
    """The outermost modules that have a forward."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    if has_forward(module):
        return [module]
    return list(dict.fromkeys(network for child in module.children() for network in _with_forward(child)))


def played(phase: Phase, compiled: list[str], by_author: bool) -> AbstractContextManager[None]:
    """A context around a phase. It explains torch's error if the phase differentiates a gradient of these players.

    `by_author`: the game itself compiles some of them.
    """
    option = f"leave torch.compile out of the game, type {type_instead(compiled[0], 'ddp+compile')} and " * by_author
    return explained(
        f"phase '{phase.name}' differentiates a gradient, and a compiled player cannot be differentiated twice "
        f"({', '.join(compiled)}); {option}type Phase('{phase.name}', ..., second_order=True), and in this phase they "
        f"run without torch.compile",
        RuntimeError,
        saying="does not currently support double backward",
    )


@contextmanager
def compiling() -> Iterator[None]:
    """For as long as there are compiled players: in torch 2.15 each patch of a setting leaves a variable behind.

    A compiled graph may run backward twice, as in plain torch. That must be set when it is compiled, and when it runs.
    And what a forward makes of a buffer that it has moved must not be computed again (torch's pull request 197039).
    """
    exact = torch._functorch.config.patch(donated_buffer=False, treat_parameters_as_free_to_save=False)
    with exact, torch._dynamo.config.patch(recompile_limit=RECOMPILES):
        yield
