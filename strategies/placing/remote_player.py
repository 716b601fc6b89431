"""A player that other ranks serve, as the ranks that train see it.

[Note: serving]
Some ranks train, and others serve frozen players to them. Both sorts start alike: every rank makes the game. Then each
sort connects to a process group of its own, which is torch's default group there, so that everything that counts ranks
counts those that train. A serving rank never trains. It waits for calls.

    training rank                                     serving ranks
    self.teacher(x)  ->  the call, x, noise's place   ->  run it, keep its graph
                     <-  what it returns              <-
    loss.backward()  ->  gradients of what it returned  ->  run its backward
                     <-  gradients of x               <-

Training rank t is served by the t-th serving rank, counted round and round. If the serving ranks share the weights
(zero3, fsdp, pipeline), all must run every call together. So in a phase all training ranks make the same calls in the
same order, and they are answered in rounds. A serving rank without a call in a round runs one that another one answers.
Inside `gathered()` and `averaged()` weights are whole, and each training rank may call alone.

docs/how/serving.md says what may change in the network, and why the messages are written by hand.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from types import FunctionType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from gan import noise, ranks
from gan.files.errors import UserError
from gan.files.tensors import Share
from gan.phase import Phase, Player
from strategies import private
from strategies.placing.messages import END, LEAVE, Bridge, Call, Enter, Packed, Returned, Slopes, Unpacker
from strategies.placing.server import Fingerprint, ServersOnPaper, rounds
from strategies.policies.choice import ranks_as_typed
from strategies.policies.policy import Policy
from strategies.sharding.resharded_parameter import hide, resharded
from strategies.sharding.storage import Storage

FAREWELL = timedelta(seconds=5)


class Servers:
    """A training rank's line to the ranks that serve some players. All have one for each set of serving ranks.

    `wish` gets the signal that has asked a serving rank to end.
    """

    answering = False  # whether this process answers a call now, which happens in a plan only

    def __init__(self, bridge: Bridge, training: range, serving: range, wish: Callable[[int], None]) -> None:
        self.bridge, self.wish = bridge, wish
        self.device, self.where = bridge.device, ranks_as_typed(serving)
        slots = {rank: rounds(training, serving, number) for number, rank in enumerate(serving)}
        self.own = next(rank for rank, those in slots.items() if (bridge.rank, True) in those)
        self.all = [rank for rank, those in slots.items() if bridge.rank in dict(those)]
        self.contexts: list[Enter] = []  # the phase that is played, or `gathered()`; the innermost is the last
        self.entered: Enter | None = None  # the one that the serving ranks know of
        self.together = False  # whether they share weights, and answer in rounds

    def meet(self) -> None:
        """Wait until they are set up."""
        _, self.together = self.bridge.receive(self.own)

    @contextmanager
    def inside(self, context: Enter) -> Iterator[None]:
        """Around a phase, or `gathered()`. The serving ranks are told at the first call. After an error none waits."""
        self.contexts.append(context)
        try:
            yield
        finally:
            self.contexts.pop()
        if self.entered == context and context not in self.contexts:
            self._leave()

    def enter(self) -> None:
        """Tell them what has begun, if they do not know."""
        if self.together and self.contexts and self.entered != self.contexts[-1]:
            self._leave()
            self.entered = self.contexts[-1]
            self.bridge.send(self.all, self.entered)

    def _leave(self) -> None:
        if self.entered is not None:
            self.bridge.send(self.all, LEAVE)
            self.entered = None

    def ask(self, message: Call | Slopes) -> Any:
        self.enter()
        in_rounds = self.together and not (self.entered is not None and self.entered.phase is None)
        self.bridge.send(self.all if in_rounds else [self.own], message)
        _, answer = self.bridge.receive(self.own)
        if isinstance(answer, Returned) and answer.signal:
            self.wish(answer.signal)
        return answer

    def end(self) -> None:
        """Tell them that no more calls will come. One that is lost is not waited for."""
        with suppress(RuntimeError):
            self.bridge.send(self.all, END, FAREWELL)


class _Step(torch.autograd.Function):
    """A call as a step of this rank's graph, which alone keeps the call: the graph on the serving rank lives as long.

    It returns the answer, and then the tensors that the call has returned.
    """

    @staticmethod
    def forward(ctx, servers: Servers | ServersOnPaper, call: Call, *tensors: Tensor) -> tuple[Any, ...]:  # noqa: ANN001
        ctx.servers, ctx.call = servers, call
        ctx.set_materialize_grads(False)
        answer = servers.ask(call)
        made = tuple(each.detach() for each in answer.tensors)
        fixed = (new for new, each in zip(made, answer.tensors, strict=True) if not each.requires_grad)
        ctx.mark_non_differentiable(*fixed)
        return answer, *made

    @staticmethod
    def backward(ctx, _: None, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        servers, call = ctx.servers, ctx.call
        if torch.is_grad_enabled():
            raise UserError(
                f"player '{call.player}': a loss differentiates a gradient that goes through it, and that does not go "
                f"through other ranks; leave @{servers.where} out"
            )
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        return None, None, *servers.ask(Slopes(call.player, call.key, list(slopes), keep))


class RemotePlayer(Policy):
    """This rank has no weights of the player. Calls of its network, or of a part of it, go to the serving ranks.

    Communication: for each call its arguments and what it returns; for its backward the gradients of both. Nothing
    between phases, and no weights.
    """

    name = "remote"
    runs_everywhere = False
    max_ranks = None
    takes = frozenset()
    divided = True
    keep = False

    def __init__(self, *args: Any, servers: Servers | ServersOnPaper) -> None:
        super().__init__(*args)
        self.servers = servers
        self.calls = 0
        self.gone: list[int] = []  # calls whose graphs are gone
        self.shared = False

    def adopt(self, training: bool) -> None:
        super().adopt(training)
        self.take_calls()

    def make_storage(self) -> Storage:
        return NoWeights(self.belongings.parameters)

    # ---- phases ----

    def during(self, phase: Phase, trying: bool = False) -> AbstractContextManager[None]:
        super().during(phase)
        return self.servers.inside(Enter(phase.name, tuple(phase.learners), phase.second_order))

    def for_several_phases(self) -> AbstractContextManager[Any]:
        return mock.patch.object(self, "shared", True)

    @contextmanager
    def gathered(self, exact: bool = True) -> Iterator[None]:
        """The serving ranks gather the weights, which stay there. Inside, each training rank may call alone."""
        if self.released:  # the serving ranks have ended
            yield
            return
        with self.servers.inside(Enter()):
            self.servers.enter()
            yield

    def averaged(self) -> AbstractContextManager[None]:
        return self.gathered()

    # ---- calls ----

    def take_calls(self) -> None:
        """From now on serving ranks answer calls of the network, its parts and their methods, and run the hooks."""
        for path, module in self.player.module.named_modules():
            names = {"_call_impl": path, **{name: f"{path}.{name}".lstrip(".") for name in methods(module)}}
            for name, called in names.items():
                call = partial(self._call, called, getattr(module, name))
                self.taken.enter_context(mock.patch.object(module, name, call))
        self.attributes = Fingerprint(self.player.module)

    def _call(self, name: str, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self.servers.answering:
            return plain(*args, **kwargs)
        # Refuse what serving ranks would answer otherwise than this rank.
        player, where = self.player.name, self.servers.where
        if self.servers.together and not self.servers.contexts:
            raise UserError(
                f"player '{player}' is called between phases, and its weights are sharded on ranks {where}; "
                f"call it inside `with trainer.strategy.gathered():`, which all ranks enter"
            )
        if (changed := self.attributes.changed()) is not None:
            raise UserError(
                f"player '{player}': '{changed}' of its network was changed after the set-up, and ranks {where}, which "
                f"serve the player, have what was there before; give it to the call as an argument, set it in the "
                f"game's constructor, or leave @{where} out"
            )
        device, kind, place = self.world.device, self.world.device.type, noise.here()
        packed = Packed((args, kwargs), device, f"player '{player}': what {name or 'its network'} is called with")
        if any(map(private.is_transformed, packed.tensors)):
            raise UserError(
                f"player '{player}': torch.func and forward mode do not go through other ranks; leave @{where} out"
            )
        self.calls += 1
        call = Call(
            player=player,
            name=name,
            arguments=packed.content,
            tensors=packed.tensors,
            key=self.calls,
            learns=torch.is_grad_enabled() and any(each.requires_grad for each in packed.tensors),
            shared=self.shared,
            autocast=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            dtype=torch.get_default_dtype(),
            place=place,
            ranks=self.world.size if ranks.more_than_one() else 1,
            training=frozenset(name for name, module in self.player.module.named_modules() if module.training),
            dropped=[self.gone.pop() for _ in range(len(self.gone))],
        )
        if call.learns:
            weakref.finalize(call, self.gone.append, call.key)
        answer, *tensors = _Step.apply(self.servers, call, *call.tensors)
        if place is not None:
            place.calls += answer.draws
        return Unpacker(answer.value, [*call.tensors, *tensors], device).load()


class NoWeights(Storage):
    """No weights are on this rank."""

    owns_part = owns_pieces = True

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__({})
        self.parameters = parameters

    @property
    def unsharded(self) -> bool:
        return False

    def shares(self) -> dict[Tensor, Share | None]:
        return dict.fromkeys(self.parameters.values())


def methods(module: nn.Module) -> set[str]:
    """`forward`, and the public methods that an author has added."""
    own = [kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.")]
    names = {name for kind in own for name, value in vars(kind).items() if isinstance(value, FunctionType)}
    return {name for name in names if not name.startswith("_") and not hasattr(nn.Module, name)} | {"forward"}


def leave(player: Player, where: str) -> None:
    """Free the memory of a player's weights, which are on other ranks. To read one here is an error from now on."""
    why = (
        f"the weights of player '{player.name}' are on {where}; call the network, a part of it, or a method of it, "
        f"which other ranks answer"
    )
    for parameter in player.module.parameters():
        if not parameter.is_meta and not resharded(parameter):
            nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
            hide(parameter, nothing, why)
