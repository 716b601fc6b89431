"""What follows from a tensor alone, computed once although several phases of a step ask for it."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")
_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def once(source: Tensor, name: Hashable, make: Callable[[], T]) -> T:
    """`make()`, or what it gave when it was last called for this tensor and name.

    It is kept as long as the tensor lives, and made again when the tensor has been written to. It must not hold the
    tensor itself, or the tensor would live for ever. A tensor with a gradient has a graph of its own each time.
    """
    if source.requires_grad or source.is_inference():  # torch does not note writes to an inference tensor
        return make()
    kept: dict[Hashable, tuple[int, Any]] = _made.setdefault(source, {})
    version, found = kept.get(name, (None, None))
    if version != source._version:
        found = make()
        kept[name] = source._version, found
    return found
