"""A serving rank: it runs the calls that training ranks send. See [Note: serving] in remote_player.py."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import torch
from torch import Tensor, nn

from gan import noise, ranks
from gan.files.errors import UserError
from gan.files.system import unless_within
from gan.phase import Phase
from strategies import private
from strategies.batches import random_state
from strategies.objects.content import TORCHS, alike, content_of, noted, same
from strategies.placing.messages import END, LEAVE, Bridge, Call, Enter, Packed, Returned, Slopes, Unpacker
from strategies.policies.choice import ranks_as_typed
from strategies.policies.policy import Policy
from strategies.turn import check_that_ranks_agree
from strategies.world import agree

PATIENCE = 30.0  # seconds, after which a rank says that it waits for others
LEFT_OUT = TORCHS | {"training", "_flat_weights", "_compiled_call_impl"}  # attributes that policies change too
Graph = tuple[list[Tensor], list[Tensor]]  # what a call has returned, and its arguments


class Fingerprint:
    """The modules, buffers and an author's attributes of a network, as they are when this is made.

    A checkpoint that is loaded writes the same values into buffers, which is no change.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network, self.before = network, _attributes(network)
        tensors = {name: value for name, (value, _) in self.before.items() if isinstance(value, Tensor)}
        self.sums = {name: noted(each) for name, each in tensors.items() if content_of(each) is not None}

    def changed(self) -> str | None:
        """The name of one that was set, removed or written since then; None if there is none."""
        now = _attributes(self.network)
        for name in self.before | now:  # an outer module comes before what is in it
            one, other = self.before.get(name, []), now.get(name, [])
            if one and other and same(one[0], other[0]) and alike(one[1], other[1]):
                continue
            if name not in self.sums or name not in now or noted(other[0]) != self.sums[name]:
                return name
            self.before[name] = other
        return None


def _attributes(network: nn.Module) -> dict[str, list[Any]]:
    """Each by its name, with a note of what is in it."""
    found = {}
    for path, module in network.named_modules():
        normed = {getattr(hook, "name", "") for hook in private.module_hooks(module)}  # weights that a norm sets
        own = {name: value for name, value in vars(module).items() if name not in LEFT_OUT | normed}
        for name, value in (own | module._buffers | module._modules).items():
            plain = isinstance(value, Tensor | nn.Module | ModuleType | type) or not hasattr(value, "__dict__")
            inside = value if plain or content_of(value) is not None else vars(value)
            found[f"{path}.{name}".lstrip(".")] = [value, noted(inside, True)]
    return found


def rounds(training: range, serving: range, number: int) -> list[tuple[int, bool]]:
    """Whose calls the serving rank of this number answers, in order; False where it only runs them with the others."""
    slots = range(number, number + len(serving) * -(-len(training) // len(serving)), len(serving))
    return [(training[slot % len(training)], slot < len(training)) for slot in slots]


class Answers:
    """What calls return, and the gradients of their arguments. `where` are the ranks of these policies' players."""

    def __init__(self, policies: Mapping[str, Policy], device: torch.device, where: str) -> None:
        self.policies, self.device, self.where = policies, device, where
        self.graphs: dict[tuple[int, str, int], Graph] = {}  # by training rank, player and key
        self.attributes: dict[str, Fingerprint] = {}  # by player, as they were before the first call

    def called(self, rank: int, call: Call, signal: int = 0) -> Returned:

        def add(values: Tensor) -> NoReturn:
            raise self._refusal(call, "uses gan.ranks")

        for key in call.dropped:
            self.graphs.pop((rank, call.player, key), None)
        policy = self.policies[call.player]
        network = policy.player.module
        if call.player not in self.attributes:
            self.attributes[call.player] = Fingerprint(network)
        for path, module in network.named_modules():
            module.training = path in call.training
        # A copy of what learns may be written to, as any tensor inside a graph, and then there is a clear error.
        inside = [each.clone() if each.requires_grad else each for each in call.tensors]
        args, kwargs = Unpacker(call.arguments, inside, self.device).load()
        versions = [each._version for each in inside]
        given = Packed((args, kwargs), self.device).content
        place = call.place
        draws, seeds = (0, (0, False)) if place is None else (place.calls, (place.of_seed, place.seeded))
        dice = random_state.dice()
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(call.learns))
            if call.autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, call.autocast))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(call.dtype)
            stack.enter_context(noise.at(place))
            stack.enter_context(ranks.alone() if call.ranks == 1 else ranks.summed_by(add, 0, 2))
            if call.shared:
                stack.enter_context(policy.for_several_phases())
            value = (attrgetter(call.name)(network) if call.name else network)(*args, **kwargs)
        seeded = place is not None and place.seeded and (place.of_seed, place.seeded) != seeds
        if seeded or dice != random_state.dice():
            what = "draws by NumPy, by random, or by torch after a seed"
            raise self._refusal(call, what, "draw in the loss, and give it to the call as an argument")
        if [each._version for each in inside] != versions:
            raise self._refusal(call, "writes into a tensor that it is called with")
        if Packed((args, kwargs), self.device).content != given:
            raise self._refusal(call, "changes a list, dict or object that it is called with")
        if (name := self.attributes[call.player].changed()) is not None:
            raise self._refusal(call, f"changes '{name}' of its network", "return it, or make it in the constructor")
        packed = Packed(value, self.device, f"what {call} returns", inside)
        if call.learns:
            self.graphs[rank, call.player, call.key] = packed.tensors, call.tensors
        return Returned(packed.content, packed.tensors, 0 if place is None else place.calls - draws, signal)

    def back(self, rank: int, message: Slopes) -> list[Tensor | None]:
        key = rank, message.player, message.key
        if key not in self.graphs:
            raise UserError(
                f"player '{message.player}': backward goes a second time through a call of it, whose graph is freed; "
                f"type backward(retain_graph=True) the first time"
            )
        returned, arguments = self.graphs[key] if message.keep else self.graphs.pop(key)
        pairs = [(each, slope) for each, slope in zip(returned, message.slopes, strict=True) if slope is not None]
        learning = [each for each in arguments if each.requires_grad]
        outputs, slopes = [each for each, _ in pairs], [slope for _, slope in pairs]
        found = iter(torch.autograd.grad(outputs, learning, slopes, allow_unused=True, retain_graph=message.keep))
        return [next(found) if each.requires_grad else None for each in arguments]

    def _refusal(self, call: Call, what: str, instead: str = "return what it makes") -> UserError:
        return UserError(
            f"{call.called} of player '{call.player}', which is on another rank, {what}; {instead}, or leave "
            f"@{self.where} out"
        )


class Server:
    """`policies` are those of the players that these ranks serve. `signal` says which one has asked to end, if any."""

    def __init__(
        self, bridge: Bridge, training: range, serving: range, policies: Mapping[str, Policy], signal: Callable[[], int]
    ) -> None:
        self.bridge, self.serving, self.policies, self.signal = bridge, serving, policies, signal
        self.rounds = rounds(training, serving, bridge.rank - serving.start)
        self.together = len(serving) > 1 and not all(policy.storage.unsharded for policy in policies.values())
        self.answers = Answers(policies, bridge.device, ranks_as_typed(serving))
        self.stack = ExitStack()  # the phase that is played, or gathered()

    def run(self) -> None:
        for rank, own in self.rounds:
            if own:
                self.bridge.send([rank], self.together)
        with self.stack:
            if self.together:
                while self._round():
                    pass
            else:
                self._one_by_one(END)

    def _round(self) -> bool:
        """Answer one call of each training rank, with the other serving ranks. False when the training has ended."""
        first = None
        for rank, own in self.rounds:
            _, message = self.bridge.receive(rank)
            first = message if first is None else first
            self._agree(first, message)
            if isinstance(message, Call | Slopes):
                self._answer(rank, message, own)
        if isinstance(first, Enter):
            self._enter(first)
        elif first == LEAVE:
            self.stack.close()
        return first != END

    def _one_by_one(self, last: str) -> None:
        """Answer calls as they come, until all training ranks have sent the last."""
        ended = 0
        while ended < len(self.rounds):
            rank, message = self.bridge.receive()
            if message == last:
                ended += 1
            elif isinstance(message, Call | Slopes):
                self._answer(rank, message, own=True)

    def _agree(self, first: Any, message: Any) -> None:
        """All ranks must run the same, because they gather weights for it together."""
        name, policy = next(iter(self.policies.items()))
        instead = f"type {name}=ddp@{self.answers.where}"
        waits = (  # perhaps the other ranks that train will never make this call
            f"\nrank {', '.join(str(rank) for rank, own in self.rounds if own)} waits for {PATIENCE:g} s, because "
            f"other ranks that train have not made the same call ({message}). Under policy '{policy.name}' all must, "
            f"in the same order; if each shall call as it likes, {instead}"
        )
        with unless_within(PATIENCE, partial(print, waits, file=sys.stderr, flush=True)):
            alike = agree(str(message), self.bridge.device)
        if not alike or str(first) != str(message):
            raise UserError(
                f"the ranks that train call players on ranks {self.answers.where} differently (one: {message}), and "
                f"under policy '{policy.name}' all must make the same calls in the same order; {instead}"
            )

    # ---- phases ----

    def _enter(self, context: Enter) -> None:
        policies = self.policies.values()
        if context.phase is None:
            for policy in policies:
                self.stack.enter_context(policy.gathered())
            self._one_by_one(LEAVE)
            self.stack.close()
            return
        # A serving rank computes no loss.
        phase = Phase(context.phase, dict, context.learners, second_order=context.second_order)
        for policy in policies:
            self.stack.enter_context(policy.during(phase))
        self.stack.callback(check_that_ranks_agree, phase, self.policies)

    def _answer(self, rank: int, message: Call | Slopes, own: bool) -> None:
        if isinstance(message, Call):
            answer = self.answers.called(rank, message, self.signal())
        else:
            answer = self.answers.back(rank, message)
        if own:
            self.bridge.send([rank], answer)


# ---- without other ranks ----


class ServersOnPaper:
    """Stands for the `Servers` of one player, in a trace. `away` is entered for all that happens on a serving rank.

    `asked` gets the player's name, and how many bytes a call or its backward sends there and gets back.
    """

    together = False  # in a trace, calls between phases are no mistake
    contexts: Sequence[Enter] = ()

    def __init__(
        self,
        policy: Policy,
        where: str,
        away: Callable[[], AbstractContextManager[None]],
        asked: Callable[[str, int, int], None],
    ) -> None:
        self.where, self.away, self.asked = where, away, asked
        self.answers = Answers({policy.player.name: policy}, policy.world.device, where)
        self.device, self.answering = policy.world.device, False

    def inside(self, context: Enter) -> AbstractContextManager[None]:
        return nullcontext()

    def enter(self) -> None:
        pass

    def ask(self, message: Call | Slopes) -> Any:
        with mock.patch.object(self, "answering", True), self.away(), torch.enable_grad():
            if isinstance(message, Call):
                sent = message.tensors
                found = self.answers.called(0, replace(message, tensors=_copies(sent)))
            else:
                sent = message.slopes
                found = self.answers.back(0, replace(message, slopes=_copies(sent)))
        returned = found.tensors if isinstance(found, Returned) else found
        moved = (sum(each.nbytes for each in tensors if each is not None) for tensors in (sent, returned))
        self.asked(message.player, *moved)
        return replace(found, tensors=_copies(returned)) if isinstance(found, Returned) else _copies(returned)


def _copies(tensors: Sequence[Tensor | None]) -> list[Any]:
    """What arrives on the other side."""
    return [each if each is None else each.detach().clone().requires_grad_(each.requires_grad) for each in tensors]
