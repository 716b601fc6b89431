"""A bucket: weights laid end to end in one piece of memory, of which every rank owns an equal shard."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gan.files.errors import UserError
from gan.files.tensors import Share
from strategies.accelerator import pins
from strategies.sharding.resharded_parameter import ReshardedParameter, forget_ended, hide, show, version_of

SIZE = 25 * 2**20  # bytes, as DDP's buckets
ALIGNED = 16  # bytes; GPU kernels are faster if a tensor's address is a multiple of it


SHARDED: dict[int, "Bucket"] = {}  # those that are resharded between phases, by the ids of their weights
UNSHARDED: dict[int, "Bucket"] = {}  # and of these the ones that are whole now, by their memory


def memory_of(tensor: Tensor) -> int:
    """Which memory a tensor uses. A tensor without values has no address, but it has this.

    0 for sparse tensors and the zeros of forward-mode derivatives, which have none.
    """
    return 0 if tensor.layout != torch.strided or tensor._is_zerotensor() else tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class Sharing:
    """Among which ranks a player is sharded, and how."""

    size: int
    rank: int
    group: Any
    copies: Any = None  # the group of the ranks that own the same shard, if shards have copies (hybrid)
    keep: bool = True  # the whole weights stay on every rank, also between phases
    home: torch.device | None = None  # the device of the shard, if it is not that of the weights
    compute_dtype: torch.dtype | None = None  # in which phases use the weights, if it is not their own


class Bucket:
    """Some weights of one dtype, and this rank's shard of them.

    [Note: shards of elements]
    The bucket's elements are sharded, not its weights: rank r owns `length` elements, from r * length on. So all ranks
    own equally much, whatever the sizes of the weights, and no weight is cut along a dimension:

        weights    |  conv.weight       | linear.weight   |bias|pad|
        ranks      |  0      |  1       |  2      |   3            |

    A rank's piece of a weight is a flat parameter over a part of the shard. The rank's optimizer gets the piece in
    place of the weight. The author's parameter stays the same object; only the memory that it uses changes.

    With `keep` that memory is always the whole bucket. The shard is a view of it if they have the same device and
    dtype. Without `keep` the memory exists between `unshard` and `reshard` only. Otherwise reading the parameter
    is an error (see resharded_parameter.py).

    [Note: written weights]
    A forward may write weights (the first batch of an ActNorm, a forced norm), and so may code between phases. Then the
    whole weights are newer than the shard. So before whole weights are dropped or gathered again, `keep_writes` copies
    this rank's part of them into its shard. It compares nothing: a comparison would make a GPU wait, and autograd's
    versions do not count what is written through `.data`. Every rank must have written the same, because each keeps
    its own part. Two cases differ. If the shard has a wider dtype, only the elements that were written are copied. If
    the shard is on another device, it is copied only if a version has changed.
    """

    multiple = 1  # of how many elements a shard is

    def __init__(self, weights: Mapping[str, nn.Parameter], sharing: Sharing) -> None:
        aligned = {name: weight.numel() * weight.element_size() % ALIGNED == 0 for name, weight in weights.items()}
        self.weights = {name: weights[name] for name in sorted(weights, key=lambda name: not aligned[name])}
        self.sharing = sharing
        *starts, elements = accumulate((weight.numel() for weight in self.weights.values()), initial=0)
        self.starts = dict(zip(self.weights, starts, strict=True))
        self.length = -(-elements // (sharing.size * self.multiple)) * self.multiple
        self.first = sharing.rank * self.length
        self._in_order, self._first_elements = list(self.weights.values()), starts
        like = next(iter(self.weights.values()))
        self.device, self.dtype = like.device, like.dtype
        self.compute_dtype = sharing.compute_dtype or self.dtype if self.dtype.is_floating_point else self.dtype
        self.whole: Tensor | None = None
        self.work: Any = None
        self.fetch: Callable[[], None] = self.unshard  # what autograd calls when it needs the weights
        self.version = 0  # how often the shards have changed
        self.moves = [0] * len(self.weights)  # how often code gave each weight other memory, whose values came back
        self.seen: list[int] = []  # versions of the weights when whole weights and shard were equal, to find writes
        self.released = False
        if sharing.keep and sharing.home is None and self.compute_dtype == self.dtype:
            self.whole = self.joined({name: weight.detach() for name, weight in self.weights.items()})
            self.take(self.whole[self.first : self.first + self.length])
            self._show()
        else:
            self.take(self.memory())
            with torch.no_grad():
                for name, piece in self.pieces.items():
                    if not isinstance(self.weights[name], ReshardedParameter):  # it has values
                        piece.copy_(self.piece_of(name, self.weights[name]))
            self._hide_all()
            if sharing.keep:
                self.unshard()

    def take(self, shard: Tensor) -> None:
        """Have the shard in this memory."""
        self.shard = shard
        self.pieces = {
            name: nn.Parameter(shard[low - self.first : high - self.first], requires_grad=weight.requires_grad)
            for name, weight in self.weights.items()
            if self._owns(name)
            for low, high in [self._range(name)]
        }

    def memory(self) -> Tensor:
        """Memory for the shard, with zeros."""
        shard = torch.zeros(self.length, dtype=self.dtype, device=self.sharing.home or self.device)
        return shard.pin_memory() if pins(self.device) and shard.device.type == "cpu" else shard

    def _range(self, name: str) -> tuple[int, int]:
        """The range of the bucket in which this rank owns elements of a weight; empty if it owns none."""
        start = self.starts[name]
        return max(start, self.first), min(start + self.weights[name].numel(), self.first + self.length)

    def _owns(self, name: str) -> bool:
        """Whether this rank has elements of a weight. One without elements is the first rank's."""
        low, high = self._range(name)
        return low < high or not (self.weights[name].numel() or self.sharing.rank)

    def piece_of(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor that has the shape of a weight, on the shard's device."""
        low, high = self._range(name)
        return tensor.reshape(-1)[low - self.starts[name] : high - self.starts[name]].to(self.shard.device, self.dtype)

    def share_of(self, name: str) -> Share | None:
        if not self._owns(name):
            return None
        # After the release only the author's parameter is written to.
        own = self.piece_of(name, self.weights[name]) if self.released else self.pieces[name]
        return Share(own.detach(), self.weights[name].shape, self._range(name)[0] - self.starts[name])

    def joined(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Lay tensors that have the weights' shapes end to end, with zeros for a weight without a tensor."""
        flat = torch.zeros(self.length * self.sharing.size, dtype=self.dtype, device=self.device)
        for name, tensor in tensors.items():
            start = self.starts[name]
            refuse_sparse(name, tensor)
            flat[start : start + tensor.numel()].copy_(tensor.reshape(-1))
        return flat

    # ---- the weights ----

    @property
    def unsharded(self) -> bool:
        return self.released or (self.whole is not None and self.work is None)

    def start_unshard(self, dtype: torch.dtype | None = None) -> None:
        """Start an all-gather of the shards as they are now; `unshard` waits for it."""
        dtype = dtype or self.compute_dtype
        if self.whole is not None and self.whole.dtype != dtype:
            self.drop()
        if self.whole is None:
            self.whole = torch.empty(self.length * self.sharing.size, dtype=dtype, device=self.device)
        shard = self.shard.to(self.device, dtype)
        self.work = dist.all_gather_into_tensor(self.whole, shard, group=self.sharing.group, async_op=True)

    def unshard(self, dtype: torch.dtype | None = None) -> None:
        """Make the weights whole, in `dtype`, by one all-gather of the ranks' shards."""
        if self.work is None:
            self.start_unshard(dtype)
        assert self.work is not None
        self.work.wait()
        self.work = None
        self._show()

    def _show(self) -> None:
        assert self.whole is not None
        if not self.sharing.keep:
            UNSHARDED[memory_of(self.whole)] = self
            SHARDED.update(dict.fromkeys(map(id, self.weights.values()), self))
        for name, weight in self.weights.items():
            start = self.starts[name]
            show(weight, self.whole[start : start + weight.numel()])
        self.up_to_date()

    def up_to_date(self) -> None:
        """Whole weights and shard are equal now. What is written from now on is found by the weights' versions."""
        if self.shard.device != self.device:
            self.seen = [version_of(weight) for weight in self.weights.values()]

    def keep_writes(self) -> None:
        """Copy into the shard what code has written into the whole weights. See [Note: written weights]."""
        if self.whole is None or self.work is not None:
            return
        moved = self._move_back()
        own = self.whole[self.first : self.first + self.length]
        if memory_of(own) == memory_of(self.shard):
            return
        if own.device != self.shard.device:
            if not moved and self.seen == [version_of(weight) for weight in self.weights.values()]:
                return
            own = own.to(self.shard.device)
        if own.dtype != self.shard.dtype:
            own = torch.where(own == self.shard.to(own.dtype), self.shard, own.to(self.shard.dtype))
        self.shard.copy_(own)
        self.up_to_date()

    def _move_back(self) -> bool:
        """After `weight.data = ...` a weight has other memory. Copy its values to its place in the bucket."""
        assert self.whole is not None
        moved, memory = False, memory_of(self.whole)
        for number, (name, weight) in enumerate(self.weights.items()):
            start, count = self.starts[name], weight.numel()
            if count and (memory_of(weight), weight.storage_offset()) != (memory, start):
                place = self.whole[start : start + count]
                place.copy_(weight.detach().reshape(-1))
                show(weight, place)
                self.moves[number] += 1
                moved = True
        return moved

    def version_at(self, element: int) -> int:
        """How often the memory of the weight at this element was written, by updates and by code."""
        number = bisect_right(self._first_elements, element) - 1
        return self.version + self.moves[number] + version_of(self._in_order[number])

    def shard_changed(self) -> None:
        """Drop the whole weights, because the shard is newer."""
        self.version += 1
        self._hide()

    def reshard(self) -> None:
        """Keep only the shard. Reading a weight is an error from now on."""
        self.keep_writes()
        self._hide()

    def _hide(self) -> None:
        if self.whole is not None or self.work is not None:
            self.drop()
            self._hide_all()

    def _hide_all(self) -> None:
        number = self.compute_dtype.is_floating_point or self.compute_dtype.is_complex
        nothing = torch.full((), torch.nan if number else 0, dtype=self.compute_dtype, device=self.device)
        for weight in self.weights.values():
            hide(weight, nothing)

    def release(self) -> None:
        """Give every weight its own memory again. Communicates nothing, so a resharded weight stays so."""
        for weight in self.weights.values() if self.unsharded else ():
            forget_ended(weight)
            show(weight, weight.data.to(self.device, self.dtype, copy=True, memory_format=torch.contiguous_format))
        self.drop()
        self.released = True
        for weight in self.weights.values():
            SHARDED.pop(id(weight), None)

    def drop(self) -> None:
        if self.work is not None:
            with suppress(RuntimeError):  # a gather that has failed, which the rank that waited for it has said
                self.work.wait()
        if self.whole is not None:
            UNSHARDED.pop(memory_of(self.whole), None)
        self.whole = self.work = None

    # ---- their gradients ----

    def take_gradients(self) -> Tensor:
        """The weights' gradients, end to end. The weights have none after that."""
        flat = self.joined({name: weight.grad for name, weight in self.weights.items() if weight.grad is not None})
        for weight in self.weights.values():
            weight.grad = None
        return flat

    def reduce_scatter(self) -> "PendingReduction":
        """Start a reduce-scatter that averages the weights' gradients, and drop them."""
        return PendingReduction(self, self.take_gradients().div_(dist.get_world_size(self.sharing.group)))

    def give_gradients(self, gradients: Tensor, scale: float = 1.0) -> None:
        """Give each piece its part of this rank's shard of the gradients, divided by the scale."""
        gradients = (gradients if scale == 1 else gradients.mul_(1 / scale)).to(self.shard.device)
        for name, piece in self.pieces.items():
            low, high = self._range(name)
            piece.grad = gradients[low - self.first : high - self.first]


def refuse_sparse(name: str, gradient: Tensor) -> None:
    if gradient.layout != torch.strided:
        raise UserError(
            f"the gradient of weight '{name}' is sparse, and ranks add up dense ones; leave sparse=True out"
        )


class PendingReduction:
    """A running reduction of a bucket's gradients: a reduce-scatter in the group, then a mean over the copies."""

    def __init__(self, bucket: Bucket, flat: Tensor) -> None:
        self.bucket, self.copies = bucket, bucket.sharing.copies
        self.flat: Tensor | None = flat  # kept, because the collective reads it until it ends
        self.shard = torch.empty(bucket.length, dtype=flat.dtype, device=flat.device)
        self.work: Any = dist.reduce_scatter_tensor(self.shard, flat, group=bucket.sharing.group, async_op=True)

    def wait(self) -> Tensor:
        """This rank's shard of the mean."""
        if self.flat is not None:
            self.work.wait()
            self.work = self.flat = None  # the work may keep the whole gradients, too
            if self.copies is not None:
                dist.all_reduce(self.shard.div_(dist.get_world_size(self.copies)), group=self.copies)
        return self.shard

    def give(self, scale: float) -> None:
        """Give each piece of the bucket its part of the mean, divided by the scale."""
        self.bucket.give_gradients(self.wait(), scale)


def parts(weights: Mapping[str, nn.Parameter], most: float | None = None) -> Iterator[dict[str, nn.Parameter]]:
    """The weights of each bucket, in their order: of one dtype, and of `most` bytes (SIZE) or a little more."""
    most = SIZE if most is None else most
    for dtype in dict.fromkeys(weight.dtype for weight in weights.values()):
        part: dict[str, nn.Parameter] = {}
        size = 0
        for name, weight in weights.items():
            if weight.dtype != dtype:
                continue
            part[name] = weight
            size += weight.numel() * weight.element_size()
            if size >= most:
                yield part
                part, size = {}, 0
        if part:
            yield part
