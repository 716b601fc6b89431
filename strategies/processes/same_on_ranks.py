"""What a rank writes for the others before its backward, if it has changed: sizes, what a loss draws, its form.

With batches of other sizes the mean of the ranks' gradients is not the mean over the samples. A rank that draws more
often than others draws other numbers after that than one device.
"""

import warnings
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gan.files.errors import UserError
from strategies.world import ALONE, World

ROWS = "rows"  # of a batch, beside draws, which have a phase and the number of a micro-batch
FORM = "operations of "  # of the loss of a phase, beside draws
NUMBER = "number "  # of the game, beside draws
NODES, SUMS, FORMS = 16, 16, 12  # first nodes of a graph, and of its sums before them; forms of a phase
OF_SUMS = {"AddBackward0", "SubBackward0", "SumBackward0", "StackBackward0"}
OF_SIZES = {"TopkBackward0", "SliceBackward0"}  # how many they take may change from step to step, as in Top-k GAN
AGAIN = 10  # how often forms are new again, because a trial has not met them


class SameOnRanks:
    """Refuses an update from batches of different sizes, or after unlike draws.

    [Note: what is compared when it changes]
    In the first step all ranks tell each other the size of their batch. From then on, a step whose batch has the same
    size as the last one costs nothing. A rank whose size changes writes the new one into torch's store before it plays.
    When its gradients are reduced, every other rank has begun the step too, and has written if its size has changed.
    So the rank reads what the others have written, and knows all sizes before it makes its update. If they differ it
    ends with an error, and the lifeline tells the others. A rank whose own size has not changed may have made this
    update meanwhile. But nothing of it can be saved, because all ranks save together.

    The same holds for what a loss draws, one after the other. A rank may draw more at the end, as for a log. And for
    the operations of a loss, which may differ, but should not begin to differ: a rank that computes others than in the
    step before warns if the next rank does not.
    """

    def __init__(self, world: World = ALONE, store: dist.Store | None = None) -> None:
        """`store` is that of this run, in which its ranks write; None if there is only one."""
        self.world, self.store = world, store
        self.last: dict[str, Sequence[object]] = {}  # the size, and the draws, that this rank has had last
        self.before: dict[str, Sequence[object]] = {}  # of these: what was before a change that is not compared yet
        self.steps = 0  # how many have begun
        self.forms: dict[str, set[int]] = {}  # of losses, by phase
        self.new: dict[str, tuple[str, int]] = {}  # those of this step, by keys without the rank
        self.again = AGAIN
        self.warned: set[str] = set()  # of these numbers
        self.warned_of_form = False  # that this rank has computed a loss otherwise than the next one

    def begin(self, size: int) -> None:
        """Call it before each step, with the size of its batch, or 0 if that is not known."""
        if self.store is None:
            return
        self.steps += 1
        if self.steps == 1:
            _refuse_unequal(dict(enumerate(self.world.gather(size))))
            self.last[ROWS] = [size]
        self._tell(ROWS, [size])

    def drew(self, whose: str, part: int, draws: Sequence[object]) -> None:
        """Call it before each backward: what the loss of a micro-batch has drawn. None stands for what is unknown."""
        self._tell(f"draws of part {part} of {whose}", draws)

    def set_between(self, numbers: Mapping[str, float]) -> None:
        """Call it before each step: the numbers that losses read, and that are others than after the last step."""
        for name, value in numbers.items():
            self._tell(NUMBER + name, [value])

    def _tell(self, what: str, values: Sequence[object]) -> None:
        if values != self.last.get(what) and self.store is not None:
            self.before[what] = self.last.get(what, values)
            self.store.set(own := self._key(what, self.world.rank), f"{self.steps} {_codes(values)}")
            self.store.check([own])  # returns when the store has it
        self.last[what] = values

    def check(self, phase: str, step: int) -> None:
        """Call it when gradients are reduced, before an update."""
        changed, self.before = self.before, {}
        size, rank = self.world.size, self.world.rank
        for what, before in changed.items():
            # Draws may change in every step. If ranks differ, one of them differs from the next one.
            others = range(size) if what == ROWS else (rank, (rank + 1) % size)
            written = {each: self._written(what, each) for each in others}
            codes = {each: _codes(before) if code is None else code for each, code in written.items()}
            if what == ROWS:
                where = f"phase '{phase}' of step {step}: "
                _refuse_unequal({each: int(code) for each, code in codes.items()}, where)
            elif what.startswith(FORM):
                self._warn_if_alone(written[(rank + 1) % size], what.removeprefix(FORM), step)
            elif what.startswith(NUMBER):
                if written[rank] != written[(rank + 1) % size] and what not in self.warned:
                    self.warned.add(what)
                    _warn_of_number(what.removeprefix(NUMBER), rank, (rank + 1) % size, step)
            else:
                where = f"{what.split(' of ', 2)[2]} of step {step}: "
                _refuse_unlike({each: code.split(",") if code else [] for each, code in codes.items()}, where)

    def _warn_if_alone(self, written: str | None, phase: str, step: int) -> None:
        if written is None and not self.warned_of_form:
            self.warned_of_form = True
            other = (self.world.rank + 1) % self.world.size
            warnings.warn(
                f"in step {step} rank {self.world.rank} has computed the loss of phase '{phase}' by other operations "
                f"than before, and rank {other} has not. That is right where each sample is computed by itself, as "
                f"in packed sequences, or in groups by a draw of each (WaveGAN's phase shuffle). If a branch for all "
                f"depends on a rank's own samples, this step was not that of one device: decide by what all ranks "
                f"know, as `if gan.ranks.mean(x) > 0` in place of `if x > 0`",
                stacklevel=2,
            )

    def _key(self, what: str, rank: int) -> str:
        # Two in turn: a rank may write for the next step before another one has read what it wrote for this one.
        return f"{what}, rank {rank}, {self.steps % 2}"

    def _written(self, what: str, rank: int) -> str | None:
        """The codes of another rank, if they have changed in this step."""
        if self.store is None or not self.store.check([self._key(what, rank)]):
            return None
        step, codes = self.store.get(self._key(what, rank)).decode().split(" ")
        return codes if int(step) == self.steps else None

    # ---- new forms ----

    def saw(self, phase: str, losses: Mapping[str, Tensor], draws: frozenset[Any] = frozenset()) -> None:
        """These are the losses of a phase, before their backward, and what it drew that no trial has shown.

        [Note: new forms of a loss]
        That is one with other names, a graph that begins with other operations, or new draws. A rank writes it into
        torch's store. When gradients are reduced every other rank has begun its backward too, and has written if the
        form is new there. So all ranks know then whether it is new on each of them.
        """
        assert self.store is not None
        nodes = _first_nodes(loss.grad_fn for loss in losses.values())
        sizes = [tuple(node._input_metadata[0].shape) for node in nodes if type(node).__name__ in OF_SIZES]
        operations = *losses, *map(type, nodes)
        self.last.setdefault(FORM + phase, operations)  # the first ones are tried before they are played
        self._tell(FORM + phase, operations)
        known, form = self.forms.setdefault(phase, set()), hash((*operations, *sizes, draws))
        if form not in known and len(known) < FORMS:
            if known or draws:
                key = f"form of '{phase}', {self.steps}, rank "
                self.new[key] = phase, form
                self.store.set(own := f"{key}{self.world.rank}", "")
                self.store.check([own])  # returns when the store has it
            known.add(form)

    def new_on_all(self) -> bool:
        """Whether a phase of this step had a new form on all ranks. Call it when its gradients are reduced."""
        assert self.store is not None
        return any(self.store.check([f"{key}{rank}" for rank in range(self.world.size)]) for key in self.new)

    def end_step(self, forget: bool) -> None:
        """`forget`: what was new is new again the next time."""
        if forget and self.again:
            self.again -= 1
            for phase, form in self.new.values():
                self.forms[phase].discard(form)
        self.new = {}


def _first_nodes(of_losses: Iterable[Any]) -> list[Any]:
    """A term that joins a sum is among them, wherever it stands."""
    waiting, nodes, sums = deque(of_losses), [], 0
    while waiting and len(nodes) < NODES + sums:
        nodes.append(node := waiting.popleft())
        inner = [each for each, _ in node.next_functions] if node is not None else []
        if type(node).__name__ in OF_SUMS and sums < SUMS:
            sums += 1
            waiting.extendleft(inner)
        else:
            waiting.extend(inner)
    return nodes


def _warn_of_number(name: str, rank: int, other: int, step: int) -> None:
    warnings.warn(
        f"before step {step} '{name}' was set on rank {rank} to another number than on rank {other}, and a loss reads "
        f"it, so training differs from one device's: set it on all ranks, to gan.ranks.mean(x) in place of x",
        stacklevel=2,
    )


def _codes(values: Sequence[object]) -> str:
    """Numbers as they are, and other objects as numbers that are the same on all ranks."""
    numbers = (each if isinstance(each, int) else zlib.crc32(repr(each).encode()) for each in values)
    return ",".join("" if each is None else str(number) for each, number in zip(values, numbers, strict=True))


def _refuse_unlike(draws: Mapping[int, Sequence[str]], where: str) -> None:
    (one, first), (other, second) = sorted(draws.items())
    unlike = [n for n, (a, b) in enumerate(zip(first, second, strict=False), 1) if a and b and a != b]
    if unlike:
        raise UserError(
            f"{where}ranks {one} and {other} draw {len(first)} and {len(second)} times, and draw {unlike[0]} is "
            f"another one, so from there on the numbers differ from one device. Whether and how often it draws must "
            f"not depend on a rank's own samples: draw before an `if`, and a fixed number of times in place of until "
            f"all samples are accepted, or by nn.init.trunc_normal_"
        )


def _refuse_unequal(sizes: Mapping[int, int], where: str = "") -> None:
    for rank, size in sizes.items():
        if size != sizes[0]:
            raise UserError(
                f"{where}rank {rank}'s batch has {size} rows and rank 0's {sizes[0]}, so the mean over ranks is not "
                f"the mean over samples; give all ranks equally many rows: datasets.GanData does, and in a loader of "
                f"your own type drop_last=True, and leave out no samples on one rank alone. Where rows are parts of "
                f"samples, such as nodes of graphs, let collate_fn return a dict of lists with a tensor for each "
                f"sample, and pack them in the loss"
            )
