"""What autograd saves for backward. For a weight that will be resharded it is a place, not the weight itself."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from strategies.sharding.bucket import UNSHARDED, Bucket, memory_of
from strategies.sharding.resharded_parameter import version_of


def kept_as_places() -> saved_tensors_hooks:
    """A context around a phase. torch uses only the innermost hooks of this kind, so all policies use these."""
    return saved_tensors_hooks(_pack, _unpack)


@dataclass(frozen=True)
class WeightPlace:
    """Where to find a weight that backward needs, and which version of it the forward used."""

    bucket: Bucket
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int


def _pack(tensor: Tensor) -> WeightPlace | tuple[Tensor, int]:
    bucket = UNSHARDED.get(_memory(tensor))
    if bucket is None or bucket.whole is None or tensor.dtype != bucket.whole.dtype:
        # The parameter may use other memory later, so keep the memory that it uses now.
        tensor = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor
        return tensor, version_of(tensor)
    offset = int(tensor.storage_offset())
    return WeightPlace(bucket, tensor.size(), tensor.stride(), offset, bucket.version_at(offset))


def _memory(tensor: Tensor) -> int:
    """Which memory a tensor uses. 0 for sparse tensors and the zeros of forward-mode derivatives, which have none."""
    if tensor.layout != torch.strided or tensor._is_zerotensor():
        return 0
    return memory_of(tensor)


def _unpack(packed: WeightPlace | tuple[Tensor, int]) -> Tensor:
    if not isinstance(packed, WeightPlace):
        tensor, version = packed
        _check(tensor.shape, version_of(tensor), version)
        return tensor
    bucket = packed.bucket
    _check(packed.size, bucket.version_at(packed.offset), packed.version)
    bucket.fetch()
    assert bucket.whole is not None
    return bucket.whole.as_strided(packed.size, packed.stride, packed.offset)


def _check(shape: torch.Size, now: int, then: int) -> None:
    """Refuse, in the words of plain torch, what was written since the forward."""
    if now != then:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {list(shape)} is at version {now}; expected version {then} instead"
        )
