"""Whether a loss is computed in a new way, on all ranks."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from strategies.processes.equal_rows import EqualRows

NODES, FORMS = 16, 12  # first nodes of a graph; forms of a phase


class Forms:
    """Notices losses of a new form: with other names, or graphs that begin with other operations, than before.

    It asks no other rank while nothing is new. A rank with a new form writes that into torch's store before its
    backward. When gradients are reduced, every other rank has begun its backward too, and has written if the form is
    new there. So all ranks know then whether it is new on each of them.
    """

    def __init__(self, rows: EqualRows) -> None:
        assert rows.store is not None
        self.rows, self.store = rows, rows.store
        self.known: dict[str, set[int]] = {}
        self.new: list[str] = []  # keys of this step, without the rank

    def saw(self, phase: str, losses: Mapping[str, Tensor]) -> None:
        """These are the losses of a phase, before their backward."""
        nodes: list[Any] = [loss.grad_fn for loss in losses.values()]
        for node in nodes:
            if node is not None and len(nodes) < NODES:
                nodes += [inner for inner, _ in node.next_functions]
        known, form = self.known.setdefault(phase, set()), hash((*losses, *map(type, nodes)))
        if form not in known and len(known) < FORMS:
            if known:
                self.new.append(f"form of '{phase}', {self.rows.run}, {self.rows.steps}, rank ")
                self.store.set(own := f"{self.new[-1]}{self.rows.rank}", "")
                self.store.check([own])  # returns when the store has it
            known.add(form)

    def new_on_all(self) -> bool:
        """Whether a phase of this step had a new form on all ranks. Call it when its gradients are reduced."""
        new, self.new = self.new, []
        return any(self.store.check([f"{key}{rank}" for rank in range(self.rows.size)]) for key in new)
