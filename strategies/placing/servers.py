"""A training rank's line to the ranks that serve some players."""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from strategies.choice import ranks_as_typed
from strategies.placing.messages import Bridge, Call, Changed, End, Enter, Found, Leave, Ready

FAREWELL = timedelta(seconds=5)


def rounds(training: range, serving: range, number: int) -> list[tuple[int, bool]]:
    """Whose calls the serving rank of this number answers, in order; False where it only runs them with the others."""
    slots = range(number, number + len(serving) * -(-len(training) // len(serving)), len(serving))
    return [(training[slot % len(training)], slot < len(training)) for slot in slots]


class Servers:
    """All training ranks have one of these for each set of serving ranks. See [Note: serving].

    `wish` gets the signal that has asked a serving rank to end.
    """

    def __init__(self, bridge: Bridge, training: range, serving: range, wish: Callable[[int], None]) -> None:
        self.bridge, self.serving, self.wish = bridge, serving, wish
        slots = {rank: rounds(training, serving, number) for number, rank in enumerate(serving)}
        self.own = next(rank for rank, those in slots.items() if (bridge.rank, True) in those)
        self.all = [rank for rank, those in slots.items() if bridge.rank in dict(those)]
        self.entered: Enter | None = None
        self.together = False

    @property
    def where(self) -> str:
        return ranks_as_typed(self.serving)

    def meet(self) -> None:
        """Wait until they are set up."""
        _, ready = self.bridge.receive(self.own)
        assert isinstance(ready, Ready)
        self.together = ready.together

    def enter(self, context: Enter) -> None:
        """Tell them that a phase, or `gathered()`, has begun, if they do not know."""
        if self.together and self.entered != context:
            self.leave(self.entered)
            self.bridge.send(self.all, context)
            self.entered = context

    def leave(self, context: Enter | None) -> None:
        """Tell them that it ends, if they know of it."""
        if self.entered is not None and self.entered == context:
            self.bridge.send(self.all, Leave())
            self.entered = None

    def ask(self, message: Any) -> Any:
        """Send a call or its gradients, and wait for the answer."""
        in_rounds = self.together and not (self.entered is not None and self.entered.phase is None)
        self.bridge.send(self.all if in_rounds else [self.own], message)
        if isinstance(message, Call) and message.changed and not in_rounds:
            self.bridge.send([rank for rank in self.all if rank != self.own], Changed(message.player, message.changed))
        _, answer = self.bridge.receive(self.own)
        if isinstance(answer, Found) and answer.signal:
            self.wish(answer.signal)
        return answer

    def end(self) -> None:
        """Tell them that no more calls will come. One that is lost is not waited for."""
        with contextlib.suppress(RuntimeError):
            self.bridge.send(self.all, End(), FAREWELL)
