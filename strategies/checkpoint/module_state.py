"""The state dict of a game in a checkpoint: weights as shares, and the other state of its modules."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from gan.checkpoint import Share
from gan.pool import ImagePool


def module_state(
    module: nn.Module,
    shares: Mapping[Tensor, Share | None],
    first: bool,
    slots: Callable[[ImagePool], dict[int, dict[int, Tensor]]] = ImagePool.get_extra_state,
    left_out: Collection[nn.Parameter] = (),
) -> dict[str, Any]:
    """This rank's part of a module's state dict. A tensor that has two names is saved under the first.

    `shares` has this rank's share of each sharded parameter. Buffers, such as running statistics, are saved by the
    first rank only. Parameters in `left_out` are not saved. Image pools differ between ranks, so each rank saves its
    own images.
    """
    state: dict[str, Any] = {}
    parameters, seen = set(module.parameters()), set(map(id, left_out))
    for key, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            state[key] = value
        elif id(value) not in seen and (first or value in parameters):
            share = shares[value] if value in shares else Share.whole(value)
            if share is not None:
                state[key] = share
        seen.add(id(value))
    for name, pool in module.named_modules():
        if isinstance(pool, ImagePool):
            state[f"{name}._extra_state" if name else "_extra_state"] = {
                place: {number: Share.whole(image) for number, image in images.items()}
                for place, images in slots(pool).items()
            }
    return state
