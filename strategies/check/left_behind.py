"""Finds what a phase in micro-batches leaves in an attribute, where a later phase reads it, or one of the next step."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn

from gan.files.errors import UserError
from gan.module import GanModule
from gan.phase import Phase
from strategies.batches.micro_batches import Batches, tensors

Read = dict[str, tuple[str, str]]  # by attribute: the phase that has left it, and the phase that reads it
OWN = vars(GanModule()).keys()  # attributes that are no author's


class Asked:
    """An attribute of a class that computes the value for instances which have none of their own."""

    def __init__(self, value_of: Callable[[Any], Any]) -> None:
        self.value_of = value_of

    def __get__(self, instance: Any, kind: type) -> Any:
        return self.value_of(instance)


class LeftBehind:
    """What phases leave in attributes with a row for each sample, as in `self.z = z.detach()`; also in networks.

    All micro-batches of a phase are played before those of the next phase. So the next phase begins with the rows of
    the last micro-batch, and with other samples.
    """

    def __init__(self, game: GanModule, batches: Batches) -> None:
        self.game, self.batches = game, batches
        self.phase = ""  # the phase that is played now
        # What was taken out of modules, by the module's id and the attribute: the value, its path, and who has left it.
        self.hidden: dict[tuple[int, str], tuple[Any, str, str]] = {}
        self.read: Read = {}
        # Inside of it, modules still give what was taken out of them, and this notes which phase asks.
        self.watching = ExitStack()

    def _hide(self, path: str, module: nn.Module, name: str) -> None:
        of_class = getattr(type(module), name, self)

        def asked(by: nn.Module) -> Any:
            if (id(by), name) in self.hidden:
                value, whole, left_by = self.hidden[id(by), name]
                if self.phase:
                    self.read.setdefault(whole, (left_by, self.phase))
                return value
            if of_class is self:
                raise AttributeError(name)
            return of_class

        self.hidden[id(module), name] = vars(module).pop(name), f"{path}.{name}".lstrip("."), self.phase
        self.watching.enter_context(mock.patch.object(type(module), name, Asked(asked), create=True))

    @contextmanager
    def during(self, phase: Phase, batch: Any) -> Iterator[None]:
        self.phase = phase.name
        if phase.micro_batches == 1:
            yield
        else:
            each = self.batches.rows(batch) // phase.micro_batches
            before = [found for *_, inside in self._kept(each) for found in inside]  # kept, so that no id is used again
            yield
            known = set(map(id, before))
            for path, module, name, inside in [*self._kept(each)]:
                if not known.issuperset(map(id, inside)):
                    self._hide(path, module, name)
        self.phase = ""

    def _kept(self, each: int) -> Iterator[tuple[str, nn.Module, str, list[Tensor]]]:
        """The attributes in which a tensor has a row for each sample of a micro-batch, with these tensors."""
        for path, module in self.game.named_modules():
            for name in vars(module).keys() - OWN:
                value = vars(module)[name]
                found = tensors(value) or tensors(getattr(value, "__dict__", ()))
                if inside := [tensor for tensor in found if tensor.ndim and len(tensor) == each]:
                    yield path, module, name, inside

    def also_in(self, other: "LeftBehind") -> Read:
        """What was read in both trials. They have other numbers of samples, so it has a row for each sample."""
        return {name: phases for name, phases in self.read.items() if other.read.get(name) == phases}


def refuse(read: Mapping[str, tuple[str, str]]) -> None:
    for name, (left_by, reader) in read.items():
        last = name.rpartition(".")[2]
        raise UserError(
            f"phase '{reader}' reads self.{name}, and gets what the last micro-batch of phase '{left_by}' has left "
            f"there: other samples than its own. Compute it in both by self.shared('{last}', function, x), which "
            f"keeps the value of each micro-batch; or leave micro_batches= out"
        )
