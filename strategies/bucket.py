"""A bucket: weights laid end to end in one piece of memory, of which every rank owns an equal share."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies.share import Share

SIZE = 25 * 2**20  # bytes; what DDP takes for its buckets
ALIGNED = 16  # bytes at which GPU kernels like a tensor to begin


class Bucket:
    """Some weights of one kind, and this rank's share of them.

    [Note: shares of elements]
    The bucket's elements, not its weights, are dealt out: rank r owns those from r * share on. So ranks own equally
    much however the weights are sized, and no weight is cut along a dimension of its own:

        weights    |  conv.weight       | linear.weight   |bias|pad|
        ranks      |  0      |  1       |  2      |   3            |

    A rank's piece of a weight is a flat parameter over its part of the share, which its optimizer takes in the
    weight's stead. The author's parameter stays the same object throughout; only the memory it shows changes.

    With `keep` that memory is always the whole bucket, and the share a view of it. Without, it is there between
    `gather` and `let_go`; in between the parameter shows not-a-numbers in its shape, which cost nothing and which
    nobody can take for weights. (Freed memory, as FSDP has it, ends the process when an operation on a CPU reads it.)
    A graph that was made before `let_go` keeps what it has seen.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], size: int, rank: int, group: Any, keep: bool) -> None:
        aligned = {name: weight.numel() * weight.element_size() % ALIGNED == 0 for name, weight in weights.items()}
        self.weights = {name: weights[name] for name in sorted(weights, key=lambda name: not aligned[name])}
        self.size, self.group, self.keep = size, group, keep
        self.total = sum(weight.numel() for weight in self.weights.values())
        self.share = -(-self.total // size)
        self.first = rank * self.share
        self.starts: dict[str, int] = {}
        start = 0
        for name, weight in self.weights.items():
            self.starts[name] = start
            start += weight.numel()
        whole = self.joined({name: weight.detach() for name, weight in self.weights.items()})
        self.own = whole[self.first : self.first + self.share]
        self.whole: Tensor | None = whole
        self.released = False
        if keep:
            self._show()
        else:
            self.own = self.own.clone()
            self.let_go()
        self.pieces = {
            name: nn.Parameter(self.own[low - self.first : high - self.first], requires_grad=weight.requires_grad)
            for name, weight in self.weights.items()
            for low, high in [self._mine(name)]
            if low < high
        }

    def _mine(self, name: str) -> tuple[int, int]:
        """From where to where, in the bucket, this rank owns a weight; nothing where that is empty."""
        start = self.starts[name]
        return max(start, self.first), min(start + self.weights[name].numel(), self.first + self.share)

    def cut(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor in the shape of a weight."""
        low, high = self._mine(name)
        return tensor.reshape(-1)[low - self.starts[name] : high - self.starts[name]]

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
        like = next(iter(self.weights.values()))
        flat = torch.zeros(self.share * self.size, dtype=like.dtype, device=like.device)
        for name, tensor in tensors.items():
            start = self.starts[name]
            flat[start : start + tensor.numel()].copy_(tensor.reshape(-1))
        return flat

    # ---- the weights ----

    @property
    def gathered(self) -> bool:
        """Whether the weights are there."""
        return self.released or self.whole is not None

    def gather(self) -> None:
        """One all-gather: the weights as the ranks' shares have them now."""
        if self.whole is None:
            self.whole = torch.empty(self.share * self.size, dtype=self.own.dtype, device=self.own.device)
            self._show()
        dist.all_gather_into_tensor(self.whole, self.own, group=self.group)

    def _show(self) -> None:
        for name, weight in self.weights.items():
            start = self.starts[name]
            weight.data = self.whole[start : start + weight.numel()].view(weight.shape)

    def let_go(self) -> None:
        """Keep the share alone."""
        self.whole = None
        nothing = torch.full((), torch.nan, dtype=self.own.dtype, device=self.own.device)
        for weight in self.weights.values():
            weight.data = nothing.expand(weight.shape)

    def release(self) -> None:
        """Give every weight memory of its own again."""
        for weight in self.weights.values():
            weight.data = weight.data.clone()
        self.whole, self.released = None, True

    # ---- their gradients ----

    def reduce(self) -> tuple[Any, Tensor, Tensor]:
        """Start a reduce-scatter of the mean of gradients: the work, its result, and what it reads meanwhile."""
        there = {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}
        flat = self.joined(there).div_(self.size)
        for name in there:
            self.weights[name].grad = None
        own = torch.empty_like(self.own)
        return dist.reduce_scatter_tensor(own, flat, group=self.group, async_op=True), own, flat

    def hand_out(self, gradients: Tensor) -> None:
        """Give the pieces their parts of this rank's share of gradients."""
        for name, piece in self.pieces.items():
            low, high = self._mine(name)
            piece.grad = gradients[low - self.first : high - self.first]


def buckets(weights: Mapping[str, nn.Parameter], size: int, rank: int, group: Any, keep: bool) -> list[Bucket]:
    """Weights in buckets, in their order; a bucket holds one kind of numbers."""
    return [Bucket(part, size, rank, group, keep) for part in _parts(weights)]


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
