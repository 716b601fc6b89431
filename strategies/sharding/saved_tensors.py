"""What autograd keeps of weights that come and go: where they are found, instead of the weights."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from strategies.sharding.bucket import SHOWN, Bucket


def kept_as_places() -> saved_tensors_hooks:
    """While a phase runs: only the innermost such hooks count, so all policies use these."""
    return saved_tensors_hooks(_pack, _unpack)


@dataclass(frozen=True)
class Place:
    """Where a weight that autograd keeps is found, and which values it saw."""

    bucket: Bucket
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int


def _pack(tensor: Tensor) -> Place | tuple[Tensor, int]:
    bucket = SHOWN.get(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else None
    if bucket is None or tensor.dtype != bucket.whole.dtype:
        tensor = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor  # which may show other memory later
        return tensor, 0 if tensor.is_inference() else tensor._version
    return Place(bucket, tensor.size(), tensor.stride(), tensor.storage_offset(), bucket.version)


def _unpack(packed: Place | tuple[Tensor, int]) -> Tensor:
    if isinstance(packed, Place):
        bucket, now, then = packed.bucket, packed.bucket.version, packed.version
    else:
        tensor, then = packed
        now = 0 if tensor.is_inference() else tensor._version
    if now != then:
        # What plain torch says where no hooks are.
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {list(packed.size if isinstance(packed, Place) else tensor.shape)} is at version "
            f"{now}; expected version {then} instead"
        )
    if isinstance(packed, Place):
        bucket.need()
        return bucket.whole.as_strided(packed.size, packed.stride, packed.offset)
    return tensor
