"""Whole gradients, for a hook that may look at all of them.

A rank's optimizer works on pieces of the weights, so a norm over their gradients is another one on each rank. A hook
that clips by it, as torch.nn.utils.clip_grad_norm_ does, would scale each rank's pieces in its own way.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from strategies.sharding.storage import Storage


@contextmanager
def whole_gradients(
    storage: Storage,
    stepped: Collection[nn.Parameter],
    optimizer: Optimizer,
    names: Sequence[Sequence[str]],
    group: Any,
) -> Iterator[None]:
    """Inside the `with`, the optimizer's groups have the author's weights, with whole gradients.

    What the code inside makes of the gradients is kept, and must be the same on all ranks. `stepped` are the weights
    that have a gradient, `names` those of each of the optimizer's groups. The weights must be whole.
    """
    there = {id(weight) for weight in stepped}
    apart = storage.gradients_apart
    gathered = {name: w for name, w in storage.weights.items() if id(w) in there and (apart or w.grad is None)}
    _gather(storage, gathered, group)
    pieces = [parameters["params"] for parameters in optimizer.param_groups]
    for parameters, members in zip(optimizer.param_groups, names, strict=True):
        parameters["params"] = [storage.weights[name] for name in members]
    try:
        yield
    finally:
        for parameters, own in zip(optimizer.param_groups, pieces, strict=True):
            parameters["params"] = own
    _keep(storage)
    for name, weight in gathered.items():
        if storage.owned.get(name) is not weight:
            weight.grad = None


def _gather(storage: Storage, weights: dict[str, nn.Parameter], group: Any) -> None:
    """Give these weights whole gradients. Each rank adds its pieces to zeros."""
    for dtype in dict.fromkeys(weight.dtype for weight in weights.values()):
        alike = {name: weight for name, weight in weights.items() if weight.dtype == dtype}
        device = next(iter(alike.values())).device
        flat = torch.zeros(sum(weight.numel() for weight in alike.values()), dtype=dtype, device=device)
        wholes = dict(zip(alike, flat.split([weight.numel() for weight in alike.values()]), strict=True))
        for name, whole in wholes.items():
            piece = storage.owned.get(name)
            if piece is not None and piece.grad is not None:
                share = storage.share_of(name, piece.grad)
                whole[share.start : share.stop].copy_(piece.grad.reshape(-1))
        dist.all_reduce(flat, group=group)
        for name, weight in alike.items():
            weight.grad = wholes[name].view_as(weight)


def _keep(storage: Storage) -> None:
    """Give each piece its part of the whole gradients. It is copied in place, because an engine may own the memory."""
    for name, piece in storage.owned.items():
        gradient = storage.weights[name].grad
        if gradient is piece.grad:
            continue
        if gradient is None:
            piece.grad = None
            continue
        share = storage.share_of(name, piece.detach())
        part = gradient.detach().reshape(-1)[share.start : share.stop]
        if piece.grad is None:
            piece.grad = part.to(piece.device, piece.dtype, copy=True)
        else:
            piece.grad.copy_(part)
