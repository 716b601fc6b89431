"""A bucket: weights laid end to end in one piece of memory, of which every rank owns an equal share."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gan.checkpoint import Share

SIZE = 25 * 2**20  # bytes; what DDP takes for its buckets
ALIGNED = 16  # bytes at which GPU kernels like a tensor to begin

SHOWN: "dict[int, Bucket]" = {}  # the gathered buckets that are not kept, by the address of their memory


@dataclass(frozen=True)
class Sharing:
    """Among whom and how a player is shared out.

    `copies` is the group of those who own what this rank owns, where not all ranks share (hybrid). `keep`: the whole
    stays on every rank. `home` is where a rank's share lies, if not beside the weights; `shown` the kind of numbers
    that phases compute with, if not the weights' own.
    """

    size: int
    rank: int
    group: Any
    copies: Any = None
    keep: bool = True
    home: torch.device | None = None
    shown: torch.dtype | None = None


class Bucket:
    """Some weights of one kind, and this rank's share of them.

    [Note: shares of elements]
    The bucket's elements, not its weights, are dealt out: rank r owns those from r * share on. So ranks own equally
    much however the weights are sized, and no weight is cut along a dimension of its own:

        weights    |  conv.weight       | linear.weight   |bias|pad|
        ranks      |  0      |  1       |  2      |   3            |

    A rank's piece of a weight is a flat parameter over its part of the share, which its optimizer takes in the
    weight's stead. The author's parameter stays the same object throughout; only the memory it shows changes.

    With `keep` that memory is always the whole bucket, and the share a view of it where they lie in one place as one
    kind of numbers. Without, it is there between `gather` and `let_go`; in between the parameter shows not-a-numbers
    in its shape, which cost nothing and which nobody can take for weights. (Freed memory, as FSDP has it, ends the
    process when an operation on a CPU reads it.)
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], sharing: Sharing) -> None:
        aligned = {name: weight.numel() * weight.element_size() % ALIGNED == 0 for name, weight in weights.items()}
        self.weights = {name: weights[name] for name in sorted(weights, key=lambda name: not aligned[name])}
        self.sharing = sharing
        self.total = sum(weight.numel() for weight in self.weights.values())
        self.share = -(-self.total // sharing.size)
        self.first = sharing.rank * self.share
        self.starts: dict[str, int] = {}
        start = 0
        for name, weight in self.weights.items():
            self.starts[name] = start
            start += weight.numel()
        like = next(iter(self.weights.values()))
        self.device, self.kind = like.device, like.dtype
        self.shown = sharing.shown or self.kind if self.kind.is_floating_point else self.kind
        whole = self.joined({name: weight.detach() for name, weight in self.weights.items()})
        self.own = whole[self.first : self.first + self.share]
        self.whole: Tensor | None = whole
        self.work: Any = None
        self.need: Callable[[], None] = self.gather  # what to call for the weights to be there
        self.version = 0
        self.released = False
        # Whether the share is a part of what is shown: then a step changes both.
        self.in_place = sharing.keep and sharing.home is None and self.shown == self.kind
        if self.in_place:
            self._show()
        else:
            self.own = self._at_home(self.own)
            self.let_go()
            if sharing.keep:
                self.gather()
        self.pieces = {
            name: nn.Parameter(self.own[low - self.first : high - self.first], requires_grad=weight.requires_grad)
            for name, weight in self.weights.items()
            for low, high in [self._mine(name)]
            if low < high
        }

    def _at_home(self, own: Tensor) -> Tensor:
        if self.sharing.home is None:
            return own.clone()
        own = own.to(self.sharing.home, copy=True)
        return own.pin_memory() if self.device.type == "cuda" and own.device.type == "cpu" else own

    def _mine(self, name: str) -> tuple[int, int]:
        """From where to where, in the bucket, this rank owns a weight; nothing where that is empty."""
        start = self.starts[name]
        return max(start, self.first), min(start + self.weights[name].numel(), self.first + self.share)

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor in the shape of a weight, where the share lies."""
        low, high = self._mine(name)
        return tensor.reshape(-1)[low - self.starts[name] : high - self.starts[name]].to(self.own.device, self.kind)

    def share_of(self, name: str) -> Share | None:
        """This rank's share of a weight, if it has any."""
        low, high = self._mine(name)
        if low >= high:
            return None
        # Once released, the author's parameter is the only one that anybody writes to.
        own = self.cut(name, self.weights[name]) if self.released else self.pieces[name]
        return Share(own.detach(), self.weights[name].shape, low - self.starts[name])

    def joined(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Tensors in the shapes of the weights laid end to end; zeros where there is none."""
        flat = torch.zeros(self.share * self.sharing.size, dtype=self.kind, device=self.device)
        for name, tensor in tensors.items():
            start = self.starts[name]
            flat[start : start + tensor.numel()].copy_(tensor.reshape(-1))
        return flat

    # ---- the weights ----

    @property
    def gathered(self) -> bool:
        """Whether the weights are there."""
        return self.released or (self.whole is not None and self.work is None)

    def start(self, kind: torch.dtype | None = None) -> None:
        """Begin an all-gather of the weights as the ranks' shares have them now; `gather` waits for it."""
        kind = kind or self.shown
        if self.whole is not None and self.whole.dtype != kind:
            self._drop()
        if self.whole is None:
            self.whole = torch.empty(self.share * self.sharing.size, dtype=kind, device=self.device)
        own = self.own.to(self.device, kind)
        self.work = dist.all_gather_into_tensor(self.whole, own, group=self.sharing.group, async_op=True)

    def gather(self, kind: torch.dtype | None = None) -> None:
        """One all-gather: the weights as the ranks' shares have them now, as `kind` of numbers."""
        if self.work is None:
            self.start(kind)
        self.work.wait()
        self.work = None
        self._show()

    def _show(self) -> None:
        if not self.sharing.keep:
            SHOWN[self.whole.data_ptr()] = self
        for name, weight in self.weights.items():
            start = self.starts[name]
            weight.data = self.whole[start : start + weight.numel()].view(weight.shape)

    def let_go(self) -> None:
        """Keep the share alone."""
        if self.whole is None:
            return
        if self.work is not None:
            self.work.wait()
        self._drop()
        nothing = torch.full((), torch.nan, dtype=self.shown, device=self.device)
        for weight in self.weights.values():
            weight.data = nothing.expand(weight.shape)

    def release(self) -> None:
        """Give every weight memory of its own again."""
        for weight in self.weights.values():
            weight.data = weight.data.to(self.kind, copy=True, memory_format=torch.contiguous_format)
        self._drop()
        self.released = True

    def _drop(self) -> None:
        if self.whole is not None:
            SHOWN.pop(self.whole.data_ptr(), None)
        self.whole = self.work = None

    # ---- their gradients ----

    def reduce(self) -> "Reduction":
        """Start a reduce-scatter of the mean of the gradients there are, and drop them."""
        there = {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}
        flat = self.joined(there).div_(dist.get_world_size(self.sharing.group))
        for name in there:
            self.weights[name].grad = None
        return Reduction(self, flat)

    def hand_out(self, gradients: Tensor) -> None:
        """Give the pieces their parts of this rank's share of gradients."""
        gradients = gradients.to(self.own.device)
        for name, piece in self.pieces.items():
            low, high = self._mine(name)
            piece.grad = gradients[low - self.first : high - self.first]


class Reduction:
    """A bucket's gradients on their way: scattered among those who share, then averaged with the copies."""

    def __init__(self, bucket: Bucket, flat: Tensor) -> None:
        self.copies = bucket.sharing.copies
        self.flat: Tensor | None = flat  # the work reads it meanwhile
        self.own = torch.empty(bucket.share, dtype=flat.dtype, device=flat.device)
        self.work = dist.reduce_scatter_tensor(self.own, flat, group=bucket.sharing.group, async_op=True)

    def wait(self) -> Tensor:
        """This rank's share of the mean."""
        if self.flat is not None:
            self.work.wait()
            self.flat = None
            if self.copies is not None:
                dist.all_reduce(self.own.div_(dist.get_world_size(self.copies)), group=self.copies)
        return self.own


def buckets(weights: Mapping[str, nn.Parameter], sharing: Sharing) -> list[Bucket]:
    """Weights in buckets, in their order; a bucket holds one kind of numbers."""
    return [Bucket(part, sharing) for part in _parts(weights)]


def _parts(weights: Mapping[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    for kind in dict.fromkeys(weight.dtype for weight in weights.values()):
        part: dict[str, nn.Parameter] = {}
        bytes_ = 0
        for name, weight in weights.items():
            if weight.dtype != kind:
                continue
            part[name] = weight
            bytes_ += weight.numel() * weight.element_size()
            if bytes_ >= SIZE:
                yield part
                part, bytes_ = {}, 0
        if part:
            yield part
