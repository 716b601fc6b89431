"""Plays a game's phases once, on one device and without values, and records what happens in them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any
from unittest import mock

import numpy as np
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gan.module import GanModule
from gan.phase import Phase
from strategies import private
from strategies.batches.micro_batches import tensors
from strategies.hooks import Hooks
from strategies.observers import Ledger, Life, Living
from strategies.options.recompute import Recompute
from strategies.placing.remote_player import RemotePlayer
from strategies.placing.server import ServersOnPaper
from strategies.policies.belongings import belongings_of
from strategies.policies.policy import Policy
from strategies.sharding.bucket import memory_of
from strategies.sharding.unshard_on_read import listen, unlisten
from strategies.turn import Training, all_learning, gradients, ready
from strategies.world import World


class Kind(StrEnum):
    """What may happen, and what `what` is then."""

    BEGIN = "begin"  # of the phase
    ENTER = "enter"  # a module's forward begins: the module
    LEAVE = "leave"  # the innermost forward ends: its module
    READ = "read"  # weights are read: a tuple of their ids
    BACKWARD = "backward"  # a backward begins: whether it is the phase's last one
    NEED = "need"  # the backward needs a weight: its id
    GRADIENT = "gradient"  # backward has added up the gradient of a weight: its id
    AGAIN = "again"  # backward computes the forward of a block again: the name of its player
    FINISH = "finish"  # the rest of the reduction of a learner: its name
    UPDATE = "update"  # a learner's step: its name
    DROP = "drop"  # of a learner's gradients: its name
    END = "end"  # of the phase


@dataclass
class Event:
    """Something that happens in a phase."""

    kind: str
    what: Any
    at: int  # the moment in which it happens; operations and events are counted
    where: str = ""  # on which ranks that serve
    passed: int = 0  # the bytes of the tensors that a forward gets or returns
    learns: bool = False  # a gradient comes back to them


@dataclass
class Trace:
    """A phase as it was played once. Activations are all memory but weights, their gradients and optimizers' states."""

    phase: str
    every: int = 1
    batch: int = 0  # its bytes
    events: list[Event] = field(default_factory=list)
    lives: list[Life] = field(default_factory=list)  # of all memory that is made, here and on ranks that serve
    uses: dict[Life, set[int]] = field(default_factory=lambda: defaultdict(set))  # after which events forwards use it
    reduced: int = 0  # bytes that the game itself sums over all ranks, in losses and in synchronised batch norms
    sent: Counter[str] = field(default_factory=Counter)  # bytes of tensors that go to ranks that serve, by player
    returned: Counter[str] = field(default_factory=Counter)  # and that come back

    def lives_on(self, where: str = "") -> list[Life]:
        return [life for life in self.lives if life.where == where]

    @property
    def moments(self) -> list[int]:
        return [event.at for event in self.events]

    @cached_property
    def activations(self) -> np.ndarray:
        """When the events happen, and then the most of each until the next one."""
        return self.batch + self.there("")

    def there(self, where: str) -> np.ndarray:
        """The same on ranks that serve players, for the calls of one rank."""
        ledger = Ledger(self.moments)
        ledger.live(0, self.lives_on(where))
        return ledger.levels()[0]

    def resting(self, where: str) -> float:
        """The most that lives there between two calls of a rank, for its backward."""
        levels = self.there(where)[: len(self.events)]
        return max(level for level, event in zip(levels, self.events, strict=True) if not event.where)


def traces(
    game: GanModule,
    batch: Any,
    recompute: Collection[str] = (),
    device: str = "meta",
    served: Mapping[str, str] = MappingProxyType({}),
) -> list[Trace]:
    """What happens in each phase of an assembled game, with a rank's batch.

    The game and the batch are on the meta device, or on a CPU, where the phases are really computed. The players in
    `recompute` compute their blocks again in backward. Those in `served` are on other ranks, with these numbers.
    `turn.gradients` plays a phase, as in training.
    """
    world = World(1, 0, torch.device(device))
    belongings = belongings_of(game.players, game, game.phases)
    recorder = Recorder(game, tensors(batch))
    policies = {name: Policy(player, world, {}, belongings[name]) for name, player in game.players.items()}
    trainer = PaperTrainer(policies)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(game, "_trainer", trainer))
        stack.callback(game.forget_shared)
        for name in sorted(recompute):
            again = Recompute(game.players[name], begin_again=partial(recorder.add, Kind.AGAIN, name))
            stack.callback(again.release)
        for player in game.players.values():
            if player.frozen:
                player.module.eval()  # as in training
        for name, where in served.items():
            # In place of its policy, that of a player on other ranks, which are in this process too.
            servers = ServersOnPaper(policies[name], where, partial(recorder.living.away, where), recorder.asked)
            policies[name] = remote = RemotePlayer(game.players[name], world, {}, belongings[name], servers=servers)
            remote.take_calls()
            stack.callback(remote.release)
        for policy in policies.values():
            stack.callback(policy.switch.turn, True)
        stack.enter_context(recorder.listening())
        stack.enter_context(planned_on(device))
        found = {}
        for step, phases in steps(game.phases).items():
            game.forget_shared()
            for phase in phases:
                found[phase.name] = _trace(game, phase, step, batch, trainer, recorder)
        return [found[phase.name] for phase in game.phases]


def steps(phases: Sequence[Phase]) -> dict[int, list[Phase]]:
    """The steps in which phases are played for a trace, with these phases: those that come together in training.

    A step in which a phase begins, and in it all that may be due then. `every` and `when` do not count.
    """
    begun = sorted({phase.start for phase in phases})
    return {step: [each for each in phases if each.start <= step < (each.until or step + 1)] for step in begun}


def _trace(
    game: GanModule, phase: Phase, step: int, batch: Any, trainer: "PaperTrainer", recorder: "Recorder"
) -> Trace:
    policies, trainer.global_step = trainer.policies, step
    recorder.begin(phase)
    for policy in policies.values():
        policy.begin_step(step)
    training = Training(game, policies, Precision(), World(), hooks=Backwards(recorder, phase.micro_batches))
    with recorder.saved(phase), ready(phase, policies):
        gradients(phase, batch, step, training)
        for name in phase.learners:
            recorder.add(Kind.FINISH, name)
            recorder.add(Kind.UPDATE, name)
            policies[name].reduction.drop()
            recorder.add(Kind.DROP, name)
    recorder.add(Kind.END)
    for policy in policies.values():
        policy.end_step(False)
    return recorder.trace


class Backwards(Hooks):
    """Says when a backward begins, and whether it is the phase's last one."""

    def __init__(self, recorder: "Recorder", left: int) -> None:
        super().__init__()
        self.recorder, self.left = recorder, left

    def call(self, name: str, *args: Any) -> None:
        if name == "on_before_backward":
            self.left -= 1
            self.recorder.add(Kind.BACKWARD, not self.left)


@dataclass
class PaperTrainer:
    """What a game may ask its trainer in a phase."""

    policies: Mapping[str, Policy]
    global_step: int = 0

    @property
    def strategy(self) -> "PaperTrainer":
        return self

    def all_learning(self) -> AbstractContextManager[None]:
        return all_learning(self.policies)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return tensor


class Recorder:
    """Writes events into a trace, with the memory that lives meanwhile."""

    def __init__(self, game: GanModule, batch: list[Tensor]) -> None:
        self.modules = dict.fromkeys([*game.modules(), *(m for p in game.players.values() for m in p.module.modules())])
        self.parameters = dict.fromkeys(p for module in self.modules for p in module.parameters(recurse=False))
        buffers = [b for module in self.modules for b in module.buffers(recurse=False)]
        self.batch = sum(each.untyped_storage().nbytes() for each in batch)
        self.living = Living([*self.parameters, *buffers, *batch], self._sums)
        self.living.saw_use = self._use
        self.id_of = {memory_of(each): id(each) for each in self.parameters}
        self.trace = Trace("")  # of the phase that is played; before the first one nothing is of interest

    @contextmanager
    def listening(self) -> Iterator[None]:
        with ExitStack() as stack:
            for module in self.modules:
                stack.enter_context(module.register_forward_pre_hook(self._enter, prepend=True))
                stack.enter_context(module.register_forward_hook(self._leave, always_call=True))
            for parameter in self.parameters:
                if parameter.requires_grad:
                    stack.enter_context(parameter.register_hook(partial(self._of_weight, id(parameter))))
                    stack.enter_context(parameter.register_post_accumulate_grad_hook(self._gradient))
            listen(self.modules, self._read)
            stack.callback(unlisten, self.modules, self._read)
            stack.enter_context(self.living)
            yield

    def saved(self, phase: Phase) -> Any:
        """Around a phase: record what backward needs. See [Note: torch.func.grad] in unshard_on_read.py."""
        return nullcontext() if phase.second_order else saved_tensors_hooks(self._pack, self._unpack)

    def begin(self, phase: Phase) -> None:
        self.trace = Trace(phase.name, phase.every, self.batch, lives=self.living.begin())
        self.add(Kind.BEGIN)

    def _use(self, life: Life) -> None:
        if not private.in_backward():
            self.trace.uses[life].add(len(self.trace.events) - 1)

    def _sums(self, _: str, args: list[Any]) -> None:
        """The game itself sums something over all ranks."""
        self.trace.reduced += sum(each.nbytes for each in args if isinstance(each, Tensor))

    def asked(self, player: str, sent: int, returned: int) -> None:
        self.trace.sent[player] += sent
        self.trace.returned[player] += returned

    def add(self, kind: str, what: Any = None) -> None:
        self.trace.events.append(Event(kind, what, self.living.tick(), self.living.where))

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.add(Kind.ENTER, module)
        self._passed(args)

    def _leave(self, module: nn.Module, args: Any, found: Any) -> None:
        self.add(Kind.LEAVE, module)
        self._passed(found)

    def _passed(self, values: Any) -> None:
        tensors = [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]
        event = self.trace.events[-1]
        event.passed, event.learns = sum(each.nbytes for each in tensors), any(each.requires_grad for each in tensors)

    def _read(self, weights: list[nn.Parameter]) -> None:
        self.add(Kind.READ, tuple(map(id, weights)))

    def _of_weight(self, weight: int, slope: Tensor) -> None:
        self.living.life(slope).mark = weight

    def _gradient(self, weight: nn.Parameter) -> None:
        if weight.grad is not None:
            self.living.forget(weight.grad)  # it is counted where the policies are played
            self.add(Kind.GRADIENT, id(weight))

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int | None]:
        of = self.id_of.get(memory_of(tensor))
        return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor, of

    def _unpack(self, packed: tuple[Tensor, int | None]) -> Tensor:
        tensor, of = packed
        if of is not None:
            self.add(Kind.NEED, of)
        return tensor


@contextmanager
def planned_on(device: str) -> Iterator[None]:
    """Inside the `with`, new tensors are on this device, and attention is counted as fused.

    torch leaves such modes while it runs a backward, in which blocks may be computed again. So they are entered there.
    """

    @contextmanager
    def modes() -> Iterator[None]:
        with FusedAttention(), torch.device(device):
            yield

    with private.in_backwards(modes), private.no_autocast_on("meta"), modes():
        yield


ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p")  # of torch's attention


class FusedAttention(TorchFunctionMode):
    """Counts attention as the fused kernels of GPUs and CPUs compute it, which keep no matrix of queries and keys.

    The meta device has no such kernel, and would count the matrix.
    """

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not nn.functional.scaled_dot_product_attention:
            return function(*args, **kwargs)
        given = {**dict(zip(ARGUMENTS, args, strict=False)), **kwargs}
        mask = given.get("attn_mask")
        fused = not given.get("dropout_p") and (mask is None or not mask.requires_grad)
        if not fused or not given["query"].is_meta:
            return function(*args, **kwargs)
        return _Attention.apply(given["query"], given["key"], given["value"])


class _Attention(torch.autograd.Function):
    """The shapes of an attention, and what its backward needs."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ANN001
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN001
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
