"""Serving ranks on paper: they answer the calls of a traced phase in this process, and are counted apart."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from strategies.placing.elsewhere import Elsewhere
from strategies.placing.messages import Call, Enter, Found, Slopes
from strategies.placing.server import Server
from strategies.policies.policy import Policy


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
