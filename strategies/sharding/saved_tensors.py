"""What autograd keeps of weights that will be resharded: the place where they are found, not the weights."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from strategies.sharding.bucket import UNSHARDED, Bucket


def kept_as_places() -> saved_tensors_hooks:
    """Around a phase. Only the innermost such hooks count, so all policies use these."""
    return saved_tensors_hooks(_pack, _unpack)


@dataclass(frozen=True)
class WeightPlace:
    """Where a weight is found that autograd needs in backward, and which version of it the forward used."""

    bucket: Bucket
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int


def _pack(tensor: Tensor) -> WeightPlace | tuple[Tensor, int]:
    bucket = UNSHARDED.get(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else None
    if bucket is None or tensor.dtype != bucket.whole.dtype:
        # A parameter may show other memory later.
        tensor = tensor.detach() if isinstance(tensor, nn.Parameter) else tensor
        return tensor, 0 if tensor.is_inference() else tensor._version
    return WeightPlace(bucket, tensor.size(), tensor.stride(), tensor.storage_offset(), bucket.version)


def _unpack(packed: WeightPlace | tuple[Tensor, int]) -> Tensor:
    if isinstance(packed, WeightPlace):
        bucket, now, then = packed.bucket, packed.bucket.version, packed.version
    else:
        tensor, then = packed
        now = 0 if tensor.is_inference() else tensor._version
    if now != then:
        # The words of plain torch.
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {list(packed.size if isinstance(packed, WeightPlace) else tensor.shape)} is at version "
            f"{now}; expected version {then} instead"
        )
    if isinstance(packed, WeightPlace):
        bucket.fetch()
        return bucket.whole.as_strided(packed.size, packed.stride, packed.offset)
    return tensor
