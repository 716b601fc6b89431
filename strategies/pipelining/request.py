"""A call of a network in stages, as one rank makes it."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from gan import noise, ranks
from gan.files.errors import UserError
from gan.files.tensors import as_bytes
from gan.noise import Place
from strategies import private
from strategies.batches import random_state
from strategies.pipelining.pipe import ForwardPlan, Pipe, in_bytes
from strategies.pipelining.program import CARRIED, Program
from strategies.sharding.resharded_parameter import version_of
from strategies.world import of_all


@dataclass
class ChunkPlace(Place):
    """Draws for each row what its own rank would have drawn for it, in a call of the whole network."""

    firsts: Sequence[int] = ()  # the place of each rank's first row
    per_rank: int = 0  # how many rows each rank calls the network with
    start: int = 0  # the chunk's rows, of those of all ranks
    stop: int = 0

    @property
    def samples(self) -> int:
        return self.stop - self.start

    def packs(self, n: int) -> bool:
        return False  # a chunk may part neighbours

    def whole(self, n: int) -> int:
        return self.total // self.rows * self.per_rank * (n // self.samples)

    def numbers_of(self, n: int) -> list[range]:
        times, left = divmod(n, self.samples)
        if left:
            raise UserError(
                f"noise of {n} rows inside a network of policy 'pipeline', which computes {self.samples} samples at a "
                f"time; draw a row for each sample"
            )
        owners = range(self.start // self.per_rank, -(-self.stop // self.per_rank))
        return [rows for time in range(times) for owner in owners for rows in self._of_rank(owner, time, times)]

    def _of_rank(self, owner: int, time: int, times: int) -> list[range]:
        """The rows of one rank, of one of so many copies of its samples."""
        first, rows = self.firsts[owner], self.per_rank
        others = {count: number + first - self.first for count, number in self.others.items()}
        of_rank = Place(self.key, first, self.rows, self.total, self.stride, others)
        calls = of_rank.numbers_of(rows * times) or [range(rows * times)]
        start, stop = (rows * time + min(max(edge - owner * rows, 0), rows) for edge in (self.start, self.stop))
        size = len(calls[0])
        return [each[max(start - copy * size, 0) : max(stop - copy * size, 0)] for copy, each in enumerate(calls)]


class ForwardRequest:
    """One call of a network, with this rank's arguments. It cuts all ranks' samples into chunks."""

    def __init__(self, pipe: Pipe, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.pipe, self.forward, self.place = pipe, forward, noise.here()
        self.leaves, self.form = pytree.tree_flatten((args, kwargs))
        # By leaf, the first one that is the same tensor: a forward may ask whether `context is x`, as attention does.
        there: dict[int, int] = {}
        every = enumerate(self.leaves)
        self.same = [there.setdefault(id(leaf), n) if isinstance(leaf, Tensor) else n for n, leaf in every]
        self.draws = 0  # of noise, in the last run
        self.dice = random_state.dice()  # each run draws what one device does in the call
        if not pipe.stage_of.keys() >= set(map(id, pipe.network.parameters())):
            raise self.pipe.refusal("is called with other weights than its own (torch.func.functional_call)")
        self.plan: ForwardPlan  # found out next

        # Whose samples go through the stages. In a trial as one device all ranks have the same, and one has them all.
        self.alone = not ranks.more_than_one()
        self.owners = 1 if self.alone else pipe.size

        # What gets a gradient: weights of this rank's stages, and arguments with a row for each sample.
        with torch._C.DisableTorchFunctionSubclass():
            self.learning = [each.requires_grad for each in pipe.network.parameters()]
            self.graph = torch.is_grad_enabled() and (any(self.learning) or any(map(_learns, self.leaves)))
            self.weights = [each for each in pipe.parameters() if self.graph and each.requires_grad]
        self.batched = self._batched()
        self.wanted = [n for n in self.batched if self.graph and self.leaves[n].requires_grad]
        self.rows = len(self.leaves[self.batched[0]])

        # What the ranks of the pipeline must have alike, and what each has of its own: where its first sample is.
        self.signature = self._signature()
        self.firsts = self._compared()
        self.chunks = self._chunks()

    @property
    def key(self) -> str:
        return f"{self.signature} in {self.chunks}"

    def _batched(self) -> list[int]:
        """The numbers of the leaves that have a row for each sample: as many rows as the first one."""
        tensors = {n: leaf for n, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)}
        rows = next((len(leaf) for leaf in tensors.values() if leaf.dim()), 0)
        found = [n for n, leaf in tensors.items() if leaf.dim() and len(leaf) == rows]
        # What had other rows than the samples in an earlier call, such as the trial, is a table in this one too.
        # One row, for all samples, cannot be mixed up with a batch.
        self.pipe.tables |= {(self.form, n) for n, leaf in tensors.items() if n not in found and leaf.shape[:1] != (1,)}
        found = [n for n in found if (self.form, n) not in self.pipe.tables]
        unlike = [leaf for leaf in self.leaves if not isinstance(leaf, CARRIED)]
        whole = [leaf for n, leaf in tensors.items() if n not in found and self.graph and leaf.requires_grad]
        if unlike:
            raise self.pipe.refusal(
                f"gets a {type(unlike[0]).__name__}; call it with tensors, numbers or lists of them"
            )
        if not rows:
            if self.pipe.trying and any(leaf.dim() for leaf in tensors.values()):
                raise ValueError("a network gets no sample")  # then a trial takes more
            raise self.pipe.refusal("gets no tensor that has a row for each sample")
        if whole:
            raise self.pipe.refusal(
                f"gets a tensor of shape {tuple(whole[0].shape)} that learns and has no row a sample"
            )
        if any(private.is_transformed(leaf) for leaf in tensors.values()):
            raise self.pipe.refusal("is differentiated by torch.func or in forward mode")
        return found

    def _signature(self) -> str:
        """What must be the same on all ranks."""
        known = [(leaf.shape, leaf.dtype, _learns(leaf)) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        # `training`, and an author's flags, which may decide what a block writes.
        modes = [
            value
            for each in self.pipe.network.modules()
            for value in vars(each).values()
            if isinstance(value, bool | str)
        ]
        kind = self.pipe.device.type
        cast = torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind)
        asked = self.pipe.units[0].name, self.form, self.same, self.learning, modes, self.graph, self.alone
        return repr((known, asked, cast, torch.get_default_dtype()))

    def _compared(self) -> list[int]:
        """The place of each rank's first sample. Raises if the ranks of the pipeline do not make the same call."""
        digest = hashlib.blake2b(self.signature.encode(), digest_size=6)
        for n, leaf in enumerate(self.leaves):
            if isinstance(leaf, Tensor) and n not in self.batched:  # all ranks must have the same
                digest.update(as_bytes(leaf.detach().cpu().contiguous()).numpy().tobytes())
        first = -1 if self.place is None else self.place.first
        own = torch.tensor([int.from_bytes(digest.digest(), "little"), first]).to(self.pipe.device, non_blocking=True)
        everyone = own.new_empty(self.pipe.size * len(own))
        dist.all_gather_into_tensor(everyone, own, group=self.pipe.group)
        codes, firsts = everyone.view(self.pipe.size, len(own)).T.tolist()
        if len(set(codes)) > 1:
            shapes = [tuple(leaf.shape) for leaf in self.leaves if isinstance(leaf, Tensor)]
            calls = of_all(f"'{self.pipe.units[0].name}' with {shapes}", self.pipe.group)
            raise self.pipe.refusal(
                f"is called by the ranks of its pipeline with other shapes, modes or numbers, or with another tensor "
                f"that has no row a sample, and all must call it alike. Its first block and the shapes of its tensors "
                f"are {' or '.join(dict.fromkeys(calls))}, and the rows of the first tensor are the samples"
            )
        return firsts[: self.owners]

    def _chunks(self) -> int:
        rows, typed = self.rows * self.owners, self.pipe.chunks
        if self.pipe.whole_batch or self.alone:  # one device has the whole batch at once
            return 1
        if typed is not None and rows % typed and not self.pipe.trying:
            fitting = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
            raise UserError(
                f"player '{self.pipe.player}': the {rows} samples of a pipeline's ranks do not divide into {typed} "
                f"chunks; type {self.pipe.player}=pipeline+chunks:N with an N of {fitting}, or choose another batch "
                f"size"
            )
        most = min(typed or 2 * self.pipe.size, rows)
        return next((n for n in range(most, 0, -1) if rows % (n * self.pipe.together) == 0), 1)

    # ---- chunks ----

    def bounds(self, chunk: int) -> tuple[int, int]:
        """The first and the last of a chunk's rows, of those of all ranks."""
        size = self.rows * self.owners // self.chunks
        return chunk * size, (chunk + 1) * size

    def inputs(self) -> dict[int, Tensor]:
        """For each leaf with rows: those of all ranks."""
        if self.alone:
            return {n: self.leaves[n].detach() for n in self.batched}
        found = {}
        for n in self.batched:
            own = self.leaves[n].detach().contiguous()
            found[n] = own.new_empty(self.pipe.size * len(own), *own.shape[1:])
            dist.all_gather_into_tensor(in_bytes(found[n]), in_bytes(own), group=self.pipe.group)
        return found

    def run(self, program: Program, inputs: Mapping[int, Tensor], chunk: int) -> tuple[list[Any], Any, list[Tensor]]:
        """Run the network's forward for a chunk.

        Returns the leaves of what it returns, with stand-ins for those elsewhere, and their form; and the leaves of the
        inputs that will get a gradient.
        """
        start, stop = self.bounds(chunk)
        leaves = [inputs[n][start:stop] if n in inputs else leaf for n, leaf in enumerate(self.leaves)]
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        learning = {n: leaves[n].requires_grad_() for n in self.wanted}
        with torch.set_grad_enabled(self.graph):
            leaves = [as_result(leaf) if n in self.batched else leaf for n, leaf in enumerate(leaves)]
        args, kwargs = pytree.tree_unflatten([leaves[n] for n in self.same], self.form)
        place = self.place
        if place is not None:
            own = {each.name: getattr(place, each.name) for each in fields(Place)}
            place = ChunkPlace(**own, firsts=self.firsts, per_rank=self.rows, start=start, stop=stop)
        random_state.set_dice(self.dice)
        runs = mock.patch.object(self.pipe, "program", program)
        with runs, torch.set_grad_enabled(self.graph), noise.at(place), program.run():
            found = self.forward(*args, **kwargs)
        if any(version_of(leaves[n]) for n in self.batched):
            raise self.pipe.refusal("changes in place what it gets; build its first layer without inplace=True")
        if place is not None and self.place is not None:
            self.draws = place.calls - self.place.calls
            seeded = place.seeded and (place.seeded, place.of_seed) != (self.place.seeded, self.place.of_seed)
            if place.follows and (seeded or program.moved_generator()):
                # It has moved on the rank of a stage alone. One that the forward has made for itself is gone by now.
                raise self.pipe.refusal(
                    "draws by a generator of the game (generator=), or after torch.manual_seed, which would then go on "
                    "differently on each rank; leave generator= out, or seed inside `with torch.random.fork_rng():`"
                )
        return *pytree.tree_flatten(found), [*learning.values()]


def as_result(leaf: Tensor) -> Tensor:
    """The same memory as no leaf and no view of one, because a block may write into it: ReLU(inplace=True)."""
    return leaf.unsafe_chunk(1)[0] if leaf.dim() else leaf


def _learns(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
