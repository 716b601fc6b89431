"""Splitting the batch of one rank into micro-batches."""

from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from gan.errors import UserError


def rows(batch: Any) -> int:
    """How many samples a batch has: the length of its first tensor that is not a scalar."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise UserError("the batch holds no tensor with a batch dimension; return tensors from the data set")


def split_batch(batch: Any, parts: int, phase: str) -> list[Any]:
    """The batch in equal chunks: tensors and lists as long as the batch are split, everything else is shared."""
    if parts == 1:
        return [batch]
    total = rows(batch)
    if total % parts:
        raise UserError(
            f"phase '{phase}': a rank's batch of {total} does not divide into {parts} micro-batches; "
            f"choose micro_batches or the batch size so that it does"
        )
    size = total // parts

    def chunk(leaf: Any, part: int) -> Any:
        has_rows = isinstance(leaf, list) or (isinstance(leaf, Tensor) and leaf.ndim)
        return leaf[part * size : (part + 1) * size] if has_rows and len(leaf) == total else leaf

    def is_strings(node: Any) -> bool:
        return isinstance(node, list) and all(isinstance(item, str) for item in node)

    return [pytree.tree_map(partial(chunk, part=part), batch, is_leaf=is_strings) for part in range(parts)]
