"""A player that other ranks serve, as the ranks that train see it. See [Note: serving]."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from gan import noise, ranks
from gan.files.checkpoint import Share
from gan.files.errors import UserError
from gan.phase import Phase, Player
from strategies import private
from strategies.placing.attributes import Attributes
from strategies.placing.messages import Bridge, Call, Enter, Found, Packed, Slopes, unpacked
from strategies.placing.placement import Part
from strategies.placing.server import Server
from strategies.placing.servers import Servers
from strategies.policies.policy import Policy
from strategies.sharding.resharded_parameter import hide, resharded
from strategies.sharding.storage import Storage


class Remote:
    """One call. While its graph lives here, the serving rank keeps the graph there."""

    def __init__(self, servers: Servers, call: Call, gone: list[int], enter: Callable[[], None]) -> None:
        """When the graph is gone, the call's key is put into `gone`. `enter` is called before the backward."""
        self.servers, self.call, self.gone, self.enter = servers, call, gone, enter
        self.answer: Found

    def returned(self) -> Any:
        tensors = list(_Step.apply(self, *self.call.tensors)) if self.call.learns else self.forward()
        return unpacked(self.answer.value, tensors, self.servers.bridge.device)

    def forward(self) -> list[Tensor]:
        self.answer = self.servers.ask(self.call)
        return self.answer.tensors

    def backward(self, slopes: list[Tensor | None]) -> list[Tensor | None]:
        if torch.is_grad_enabled():
            raise UserError(
                f"player '{self.call.player}': a loss differentiates a gradient that goes through it, and that does "
                f"not go through other ranks; leave @{self.servers.where} out"
            )
        self.enter()
        return self.servers.ask(Slopes(self.call.player, self.call.key, slopes, private.keeps_graph()))

    def __del__(self) -> None:
        if self.call.learns:
            self.gone.append(self.call.key)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx, remote: Remote, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN001
        ctx.remote = remote
        ctx.set_materialize_grads(False)
        found = remote.forward()
        made = tuple(each.detach() for each in found)
        ctx.mark_non_differentiable(*(n for n, each in zip(made, found, strict=True) if not each.requires_grad))
        return made

    @staticmethod
    def backward(ctx, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        return None, *ctx.remote.backward(list(slopes))


def refuse_a_group() -> None:
    """Refuse a process group that is there before: torch's default group must be that of the part."""
    if dist.is_initialized():
        raise UserError(
            "players on ranks of their own need process groups of their own, and this process has one already; train "
            "with '@' in a program of its own, and without init_process_group"
        )


def connect(part: Part, store: dist.Store, size: int, device: torch.device, backend: str, **options: Any) -> Bridge:
    """Make the process group of this rank's part, and the bridge to all ranks of the run."""
    own = dist.PrefixStore(part.name, store)
    dist.init_process_group(backend, store=own, rank=part.rank, world_size=part.size, **options)
    return Bridge(store, part.ranks[part.rank], size, device)


class Elsewhere(Policy):
    """This rank has no weights of the player. Calls of its network, or of a part of it, go to the serving ranks.

    Communication: for each call its arguments and what it returns; for its backward the gradients of both. Nothing
    between phases, and no weights.
    """

    name = "elsewhere"
    max_ranks = None
    takes = frozenset()
    begins_sharded = True

    def __init__(self, *args: Any, servers: Servers) -> None:
        super().__init__(*args)
        self.servers = servers
        self.contexts: list[Enter] = []  # the phase that is played, or `gathered()`; the innermost is the last
        self.calls = 0
        self.gone: list[int] = []  # calls whose graphs are gone
        self.shared = False
        self.taken: list[tuple[str, nn.Module, dict[str, Callable[..., Any]]]] = []  # by path: our calls of methods
        self.undo: list[Callable[[], None]] = []

    def adopt(self, training: bool) -> None:
        super().adopt(training)
        self.take_calls()

    def make_storage(self) -> Storage:
        return Away(self.belongings.parameters)

    def release(self) -> None:
        while self.undo:
            self.undo.pop()()
        self.taken = []
        super().release()

    # ---- phases ----

    @contextmanager
    def hold(self, phase: Phase) -> Iterator[None]:
        with self._inside(Enter(phase.name, phase.learners, phase.second_order)):
            yield

    @contextmanager
    def for_several_phases(self) -> Iterator[None]:
        before, self.shared = self.shared, True
        try:
            yield
        finally:
            self.shared = before

    @contextmanager
    def gathered(self, exact: bool = True) -> Iterator[None]:
        """The serving ranks gather the weights, which stay there. Inside, each training rank may call alone."""
        if self.released:  # the serving ranks have ended
            yield
            return
        with self._inside(Enter()):
            self.servers.enter(Enter())
            yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        with self.gathered():
            yield

    @contextmanager
    def _inside(self, context: Enter) -> Iterator[None]:
        """After an error it waits for no rank."""
        self.contexts.append(context)
        try:
            yield
        except BaseException:
            self.contexts.pop()
            raise
        self.contexts.pop()
        self.servers.leave(context)

    def _enter(self) -> None:
        if self.contexts:
            self.servers.enter(self.contexts[-1])

    # ---- calls ----

    def take_calls(self) -> None:
        """From now on calls of the network, of its parts and of their methods go to the serving ranks."""
        for path, module in self.player.module.named_modules():
            self._take_calls(path, module)
        self.attributes = Attributes(self.player.module)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Inside the `with`, calls are answered here. It is for a plan, in which this process is all ranks."""
        for _, module, made in self.taken:
            for name in made:
                del vars(module)[name]
        try:
            yield
        finally:
            for _, module, made in self.taken:
                vars(module).update(made)

    def _take_calls(self, path: str, module: nn.Module) -> None:
        """Calls of a module, and of its own methods, go to the serving ranks. The module's hooks run there."""
        taken: dict[str, str | None] = {"_call_impl": None, **{name: name for name in methods(module)}}
        before = {name: vars(module)[name] for name in taken if name in vars(module)}
        made = {name: self._caller(path, method) for name, method in taken.items()}
        vars(module).update(made)
        self.taken.append((path, module, made))

        def undo() -> None:
            for name in made:
                vars(module).pop(name, None)
            vars(module).update(before)

        self.undo.append(undo)

    def _caller(self, path: str, method: str | None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(path, method, (args, kwargs))

        return call

    def _call(self, path: str, method: str | None, arguments: Any) -> Any:
        self._check_call()
        self._enter()
        device, kind, place = self.world.device, self.world.device.type, noise.here()
        called = ".".join(filter(None, (path, method))) or "its network"
        packed = Packed(arguments, device, f"player '{self.player.name}': what {called} is called with")
        if any(map(private.is_transformed, packed.tensors)):
            raise UserError(
                f"player '{self.player.name}': torch.func and forward mode do not go through other ranks; leave "
                f"@{self.servers.where} out"
            )
        self.calls += 1
        gone = list(self.gone)
        del self.gone[: len(gone)]
        request = Call(
            player=self.player.name,
            module=path,
            method=method,
            arguments=packed.content,
            tensors=packed.tensors,
            key=self.calls,
            learns=torch.is_grad_enabled() and any(each.requires_grad for each in packed.tensors),
            shared=self.shared,
            autocast=torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
            place=place,
            ranks=self.world.size if ranks.more_than_one() else 1,
            changed=self.attributes.changed(),
            dropped=gone,
        )
        remote = Remote(self.servers, request, self.gone, self._enter)
        returned = remote.returned()
        if place is not None:
            place.calls += remote.answer.draws
        if remote.answer.changed:
            self._tell(remote.answer.changed)
            self.attributes.forget(remote.answer.changed)
        return returned

    def _check_call(self) -> None:
        """Refuse a call that serving ranks would answer otherwise than this rank."""
        name = self.player.name
        if self.servers.together and not self.contexts:
            raise UserError(
                f"player '{name}' is called between phases, and its weights are sharded on ranks {self.servers.where}; "
                f"call it inside `with trainer.strategy.gathered():`, which all ranks enter"
            )
        replaced = self.attributes.replaced(self.player.module)
        for path, module, made in self.taken:
            for method, ours in made.items():
                if vars(module).get(method) is not ours:
                    replaced = ".".join(filter(None, (path, method)))
        if replaced is not None:
            raise UserError(
                f"player '{name}': '{replaced}' was replaced, and ranks {self.servers.where}, which serve the player, "
                f"have the one before; do that in the game's constructor, or leave @{self.servers.where} out"
            )

    def _tell(self, changed: Iterable[tuple[str, str]]) -> None:
        for path, key in changed:
            here = vars(self.player.module.get_submodule(path)).get(key)
            if here is not None and not (isinstance(here, list | dict | tuple) and not here):  # no cache that was empty
                rank_zero_warn(
                    f"player '{self.player.name}': a call sets '{'.'.join(filter(None, (path, key)))}', on ranks "
                    f"{self.servers.where} only; to read it here is an AttributeError from now on: return it instead"
                )


class Away(Storage):
    """No weights are on this rank."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__({})
        self.parameters = parameters

    @property
    def sharded(self) -> bool:
        return True

    @property
    def unsharded(self) -> bool:
        return False

    def shares(self) -> dict[nn.Parameter, Share | None]:
        return dict.fromkeys(self.parameters.values())


def methods(module: nn.Module) -> set[str]:
    """`forward`, and the public methods that an author has added."""
    own = [kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.")]
    names = {name for kind in own for name, value in vars(kind).items() if isinstance(value, FunctionType)}
    return {name for name in names if not name.startswith("_") and not hasattr(nn.Module, name)} | {"forward"}


def leave(player: Player, where: str) -> None:
    """Free the memory of a player's weights, which are on other ranks. To read one here is an error from now on."""
    for parameter in player.module.parameters():
        if not parameter.is_meta and not resharded(parameter):
            nothing = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
            hide(parameter, nothing, f"the weights of player '{player.name}' are on {where}")


def check(player: Player, others: Mapping[str, Player], typed: str) -> None:
    """Refuse a player that other ranks cannot serve. `typed` is its policy with its ranks."""
    policy, _, where = typed.partition("@")
    what = f"player '{player.name}' is on ranks of its own ({where})"
    if not player.frozen or player.follows is not None:
        raise UserError(
            f"{what}, and only frozen players can be, for a learner's gradients, averages and checkpoints would "
            f"have to travel with every call; type {player.name}={policy}, without ranks"
        )
    if player.weights is None:
        raise UserError(
            f"{what}, so its weights must come from a file that those ranks read: Player('{player.name}', ..., "
            f"weights='{player.name}.safetensors'); write one with "
            f"safetensors.torch.save_file(network.state_dict(), '{player.name}.safetensors')"
        )
    own = set(player.module.parameters())
    for other in others.values():
        if other is not player and not own.isdisjoint(other.module.parameters()):
            raise UserError(
                f"{what}, and player '{other.name}' has some of its weights too; leave @{where} out, or give both "
                f"networks of their own"
            )
    for name, module in player.module.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values(), *module._backward_hooks.values()]
        if any(not type(hook).__module__.startswith("torch.") for hook in hooks):
            raise UserError(
                f"{what}, and '{name or type(module).__name__}' has a forward hook, which would run there and not "
                f"here; return from forward what the hook collects, or leave @{where} out"
            )


@dataclass(frozen=True)
class _Here:
    """What a `Server` asks of its bridge, where nothing is sent."""

    device: torch.device
    rank: int = 1


class ServersOnPaper:
    """Stands for the `Servers` of one player. `away` is entered for all that happens on a serving rank.

    `asked` gets the player's name, and how many bytes a call or its backward sends there and gets back.
    """

    together = False  # in a trace, calls between phases are no mistake

    def __init__(
        self,
        policy: Policy,
        where: str,
        away: Callable[[], AbstractContextManager[None]],
        asked: Callable[[str, int, int], None],
    ) -> None:
        self.where, self.away, self.asked = where, away, asked
        self.bridge = _Here(policy.world.device)
        self.server = Server(self.bridge, range(1), range(1, 2), {policy.player.name: policy}, int)
        self.player: Elsewhere

    def serve(self, player: Elsewhere) -> None:
        """From now on calls of the player's network come here."""
        self.player = player
        player.take_calls()

    def enter(self, context: Enter) -> None:
        """Nobody needs to know."""

    def leave(self, context: Enter) -> None:
        """Nobody needs to know."""

    def ask(self, message: Call | Slopes) -> Found | list[Tensor | None]:
        called = isinstance(message, Call)
        sent = message.tensors if called else message.slopes
        with self.player.set_aside(), self.away(), torch.enable_grad():
            if called:
                found = self.server._called(0, replace(message, tensors=_copies(sent), changed={}))
            else:
                found = self.server._back(0, replace(message, slopes=_copies(sent)))
        returned = found.tensors if called else found
        self.asked(message.player, _bytes(sent), _bytes(returned))
        return replace(found, tensors=_copies(returned), changed=[]) if called else _copies(returned)


def _copies(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """What arrives on the other side."""
    return [None if each is None else each.detach().clone().requires_grad_(each.requires_grad) for each in tensors]


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(each.nbytes for each in tensors if each is not None)
