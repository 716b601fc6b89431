"""A serving rank: it runs the calls that training ranks send. See [Note: serving]."""

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from gan import noise, ranks
from gan.files.errors import UserError
from gan.phase import Phase
from strategies.choice import ranks_as_typed
from strategies.placing.attributes import Attributes
from strategies.placing.messages import Bridge, Call, Changed, End, Enter, Found, Leave, Packed, Ready, Slopes, unpacked
from strategies.placing.servers import rounds
from strategies.policies.policy import Policy
from strategies.ranks import agree
from strategies.turn import check_that_ranks_agree

PATIENCE = 30.0  # seconds, after which a rank says that it waits for others
Graph = tuple[list[Tensor], list[Tensor]]  # what a call has returned, and its arguments


class Server:
    """`policies` are those of the players that these ranks serve. `signal` says which one has asked to end, if any."""

    def __init__(
        self,
        bridge: Bridge,
        training: range,
        serving: range,
        policies: Mapping[str, Policy],
        signal: Callable[[], int],
    ) -> None:
        self.bridge, self.serving, self.policies, self.signal = bridge, serving, policies, signal
        self.rounds = rounds(training, serving, bridge.rank - serving.start)
        self.together = len(serving) > 1 and not all(policy.storage.unsharded for policy in policies.values())
        self.attributes = {name: Attributes(policy.player.module) for name, policy in policies.items()}
        self.graphs: dict[tuple[int, str, int], Graph] = {}  # by training rank, player and key
        self.stack = ExitStack()  # the phase that is played, or gathered()

    def run(self) -> None:
        """Answer calls until the training ends."""
        for rank, own in self.rounds:
            if own:
                self.bridge.send([rank], Ready(self.together))
        with self.stack:
            if self.together:
                while self._round():
                    pass
            else:
                self._one_by_one(End)

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
        elif isinstance(first, Leave):
            self._leave()
        return not isinstance(first, End)

    def _one_by_one(self, last: type) -> None:
        """Answer calls as they come, until all training ranks have sent the last."""
        ended = 0
        while ended < len(self.rounds):
            rank, message = self.bridge.receive()
            if isinstance(message, last):
                ended += 1
            elif isinstance(message, Changed):
                self.attributes[message.player].set(message.values)
            elif isinstance(message, Call | Slopes):
                self._answer(rank, message, own=True)

    def _agree(self, first: Any, message: Any) -> None:
        """All ranks must run the same, because they gather weights for it together."""
        alone = threading.Timer(PATIENCE, self._say_who_waits, [message])
        alone.daemon = True
        alone.start()
        try:
            alike = agree(str(message), self.bridge.device)
        finally:
            alone.cancel()
        if not alike or str(first) != str(message):
            name, policy = next(iter(self.policies.items()))
            raise UserError(
                f"the ranks that train call players on ranks {ranks_as_typed(self.serving)} differently (one: "
                f"{message}), and under policy '{policy.name}' all must make the same calls in the same order; type "
                f"{name}=ddp@{ranks_as_typed(self.serving)}"
            )

    def _say_who_waits(self, message: Any) -> None:
        """One rank that trains has called, and others have not for a while. Perhaps they never will."""
        name, policy = next(iter(self.policies.items()))
        where, ranks = ranks_as_typed(self.serving), [rank for rank, own in self.rounds if own]
        print(
            f"\nrank {', '.join(map(str, ranks))} waits for {PATIENCE:g} s, because other ranks that train have not "
            f"made the same call ({message}). Under policy '{policy.name}' all must, in the same order; if each shall "
            f"call as it likes, type {name}=ddp@{where}",
            file=sys.stderr,
            flush=True,
        )

    # ---- phases ----

    def _enter(self, context: Enter) -> None:
        policies = self.policies.values()
        if context.phase is None:
            for policy in policies:
                self.stack.enter_context(policy.gathered())
            self._one_by_one(Leave)
            self._leave()
            return
        phase = Phase(context.phase, _never, context.learners, second_order=context.second_order)
        for policy in policies:
            policy.begin(phase)
            self.stack.enter_context(policy.hold(phase))
        self.stack.callback(check_that_ranks_agree, phase, self.policies)

    def _leave(self) -> None:
        self.stack.close()

    # ---- calls ----

    def _answer(self, rank: int, message: Call | Slopes, own: bool) -> None:
        answer = self._called(rank, message) if isinstance(message, Call) else self._back(rank, message)
        if own:
            self.bridge.send([rank], answer)

    def _called(self, rank: int, call: Call) -> Found:
        for key in call.dropped:
            self.graphs.pop((rank, call.player, key), None)
        policy, attributes = self.policies[call.player], self.attributes[call.player]
        attributes.set(call.changed)
        module = attributes.modules[call.module]
        # A copy of what learns may be written to, as any tensor inside a graph, and then there is a clear error.
        inside = [each.clone() if each.requires_grad else each for each in call.tensors]
        args, kwargs = unpacked(call.arguments, inside, self.bridge.device)
        versions = [each._version for each in inside]
        given = Packed((args, kwargs), self.bridge.device).content
        place = call.place
        before = 0 if place is None else place.calls
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(call.learns))
            stack.enter_context(self._autocast(call))
            stack.enter_context(noise.at(place))
            stack.enter_context(ranks.alone() if call.ranks == 1 else ranks.summed_by(self._refused(call), 0, 2))
            if call.shared:
                stack.enter_context(policy.for_several_phases())
            value = module(*args, **kwargs) if call.method is None else getattr(module, call.method)(*args, **kwargs)
        if [each._version for each in inside] != versions:
            raise self._refusal(call, "writes into a tensor that it is called with")
        if Packed((args, kwargs), self.bridge.device).content != given:
            raise self._refusal(call, "changes a list, dict or object that it is called with")
        packed = Packed(value, self.bridge.device, f"what {call} returns")
        if call.learns:
            self.graphs[rank, call.player, call.key] = packed.tensors, call.tensors
        changed = list(attributes.changed())
        draws = 0 if place is None else place.calls - before
        return Found(packed.content, packed.tensors, draws, changed, self.signal())

    def _autocast(self, call: Call) -> AbstractContextManager[Any]:
        return nullcontext() if call.autocast is None else torch.autocast(self.bridge.device.type, call.autocast)

    def _refused(self, call: Call) -> Callable[[Tensor], NoReturn]:
        def add(values: Tensor) -> NoReturn:
            raise self._refusal(call, "uses gan.ranks")

        return add

    def _refusal(self, call: Call, what: str) -> UserError:
        return UserError(
            f"{call.called} of player '{call.player}' {what}, which is on another rank; return what it makes, or "
            f"leave @{ranks_as_typed(self.serving)} out"
        )

    def _back(self, rank: int, message: Slopes) -> list[Tensor | None]:
        """The gradients of a call's arguments."""
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


def _never(batch: Any) -> NoReturn:
    raise AssertionError("a serving rank plays no phase")
