"""Weights that are not finite: a NaN or an infinity, from which no training and no sample recovers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gan.files.errors import UserError

Bad = tuple[str, str, str]  # the player, its tensor, and what is in it


class NotFinite(UserError):
    """A checkpoint has weights that are not finite. Every rank raises it together."""

    agreed = True


def not_finite(state: Mapping[str, Any]) -> dict[str, str]:
    """The tensors of a state that have a NaN or an infinity, and which of both. It reads each once, and copies none."""
    bounds: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, Tensor):  # what a module's get_extra_state() gives
            continue
        tensor = tensor.detach()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
            if tensor.itemsize == 1:
                tensor = tensor.float()  # torch has no minimum of such numbers
            ends = torch.stack(torch.aminmax(tensor))  # a NaN is both
            bounds[name] = torch.stack([ends.isnan().any(), ends.isinf().any()])
    if not bounds:
        return {}
    device = next(iter(bounds.values())).device
    pairs = zip(bounds, torch.stack([each.to(device) for each in bounds.values()]).tolist(), strict=True)
    return {name: "NaN" if nan else "infinity" for name, (nan, infinite) in pairs if nan or infinite}


def as_made(module: nn.Module) -> set[str]:
    """Buffers in which infinities are meant, such as masks: constructors made them so; and those without values yet."""
    buffers = dict(module.named_buffers(remove_duplicate=False))
    return {name for name, buffer in buffers.items() if buffer.is_meta} | not_finite(buffers).keys()


def names_of(found: Sequence[Bad]) -> str:
    player, tensor, what = found[0]
    more = f", and {len(found) - 1} more tensors have" if len(found) > 1 else " has"
    return f"'{tensor}' of player '{player}'{more} {what if len(found) == 1 else 'NaN or infinity'}"


def of_players(modules: Iterable[tuple[str, nn.Module]], meant: Mapping[str, set[str]]) -> list[Bad]:
    """What is not finite in whole networks. `meant` has the buffers that may be so."""
    found: list[Bad] = []
    for player, module in modules:
        bad = not_finite(module.state_dict(keep_vars=True))
        found += [(player, name, what) for name, what in bad.items() if name not in meant[player]]
    return found
