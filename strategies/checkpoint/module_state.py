"""A game's own state in a checkpoint: weights as shares, and what else its modules keep."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from gan.pool import ImagePool
from strategies.checkpoint.directory import read, whole
from strategies.sharding.share import Share

Dealt = Mapping[Tensor, Share | None]  # this rank's share of each parameter that is dealt out among ranks


def module_state(
    module: nn.Module,
    dealt: Dealt,
    first: bool,
    slots: Callable[[ImagePool], dict[int, dict[int, Tensor]]] = ImagePool.get_extra_state,
) -> dict[str, Any]:
    """What this rank has of a module's state dict; a tensor of two names is there under one.

    Of what is no parameter, such as running statistics, the first rank's is everyone's; pools differ by rank.
    """
    state: dict[str, Any] = {}
    parameters, seen = set(module.parameters()), set()
    for key, value in module.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            state[key] = value
        elif id(value) not in seen and (first or value in parameters):
            share = dealt[value] if value in dealt else Share.whole(value)
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


def load_module_state(module: nn.Module, saved: Mapping[str, Any], dealt: Dealt, strict: bool = True) -> None:
    """Read it: shares straight to their places, whole tensors by way of torch's own `load_state_dict`.

    A RuntimeError says what does not fit, as torch does.
    """
    own = module.state_dict(keep_vars=True)
    names = {id(value): key for key, value in own.items() if key in saved}
    found = {key: saved[names[id(value)]] for key, value in own.items() if id(value) in names}
    straight = {key: own[key] for key in found if isinstance(own[key], nn.Parameter) and own[key] in dealt}
    for key, weight in straight.items():
        if found[key].shape != weight.shape:
            raise RuntimeError(f"size mismatch for {key}: {tuple(found[key].shape)} there, {tuple(weight.shape)} here")
    shares = {found[key]: dealt[weight] for key, weight in straight.items()}
    read({there: share for there, share in shares.items() if share is not None})

    rest = {key: value for key, value in found.items() if key not in straight}
    rest |= {key: value for key, value in saved.items() if key not in own}
    missing, unexpected = module.load_state_dict(whole(rest), strict=False)
    missing = [key for key in missing if key not in straight]
    if strict and (missing or unexpected):
        raise RuntimeError(f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}")
