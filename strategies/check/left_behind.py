"""Finds what a phase in micro-batches leaves in an attribute of the game, where a later phase reads it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor

from gan.files.errors import UserError
from gan.module import GanModule
from gan.phase import Phase
from strategies.micro_batches import rows

Read = dict[str, tuple[str, str]]  # by attribute: the phase that has left it, and the phase that reads it


class LeftBehind:
    """Tensors with a row for each sample that phases leave in attributes of the game, as in `self.z = z.detach()`.

    All micro-batches of a phase are played before those of the next phase. So the next phase begins with the rows of
    the last micro-batch, and with other samples.
    """

    def __init__(self, game: GanModule) -> None:
        self.game = game
        self.phase = ""  # the phase that is played now
        self.hidden: dict[str, tuple[Tensor, str]] = {}  # attributes taken out of the game, and the phase of each
        self.read: Read = {}

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside the `with`, the game still gives what was taken out of it, and this notes which phase asks."""
        plain = type(self.game).__getattr__

        def get(module: Any, name: str) -> Any:
            if module is not self.game or name not in self.hidden:
                return plain(module, name)
            value, left_by = self.hidden[name]
            if self.phase:
                self.read.setdefault(name, (left_by, self.phase))
            return value

        with mock.patch.object(type(self.game), "__getattr__", get):
            yield

    @contextmanager
    def during(self, phase: Phase, batch: Any) -> Iterator[None]:
        before, self.phase = dict(vars(self.game)), phase.name
        yield
        self.phase = ""
        if phase.micro_batches > 1:
            each = rows(batch) // phase.micro_batches
            now = {name: value for name, value in vars(self.game).items() if isinstance(value, Tensor) and value.ndim}
            for name, value in now.items():
                if value is not before.get(name) and len(value) == each:
                    self.hidden[name] = vars(self.game).pop(name), phase.name

    def also_in(self, other: "LeftBehind") -> Read:
        """What was read in both trials. They have other numbers of samples, so it has a row for each sample."""
        return {name: phases for name, phases in self.read.items() if other.read.get(name) == phases}


def refuse(read: Mapping[str, tuple[str, str]]) -> None:
    for name, (left_by, reader) in read.items():
        raise UserError(
            f"phase '{reader}' reads self.{name}, and gets what the last micro-batch of phase '{left_by}' has left "
            f"there: other samples than its own. Compute it in both by self.shared('{name}', function, x), which "
            f"keeps the value of each micro-batch; or leave micro_batches= out"
        )
