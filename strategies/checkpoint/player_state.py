"""The state of a player in a checkpoint, in addition to its weights: its average and its optimizer.

Each rank saves and loads its shares of the tensors, under the names that plain torch uses.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from gan.ema import Ema
from gan.files.checkpoint import SavedTensor, Share, misfit, read
from gan.files.errors import UserError
from strategies.optimizers import treats_elements
from strategies.policies.policy import Policy


def average_state(policy: Policy) -> dict[str, Share] | None:
    """This rank's share of each weight's average, if there are some. Buffers' averages are whole on every rank."""
    if policy.ema is None:
        return None
    return {
        name: policy.storage.share_of(name, average) if name in policy.storage.weights else Share.whole(average)
        for name, average in policy.ema.state_dict().items()
    }


def load_average(policy: Policy, saved: Mapping[str, SavedTensor] | None) -> None:
    """Load the averages. If none were saved, they start at the weights."""
    if policy.ema is None and saved is not None and policy.optimizer is None:
        # The average that the optimizer of a training has kept: only to evaluate with.
        policy.ema = Ema(policy.storage.owned, policy.player.decay)
    if not isinstance(policy.ema, Ema):
        return
    if saved is None:
        policy.ema.load_state_dict(None)
    else:
        shares = average_state(policy)
        if missing := shares.keys() - saved.keys():
            raise UserError(f"player '{policy.player.name}': the checkpoint has no average of '{min(missing)}'")
        read({saved[name]: share for name, share in shares.items()})


def optimizer_state(policy: Policy) -> dict[str, Any]:
    """The optimizer's state dict as in plain torch, with names in place of numbers and shares in place of tensors."""
    packed = policy.optimizer.state_dict()
    named = {name: packed["state"][n] for n, name in enumerate(_stepped(policy)) if n in packed["state"]}
    plain = {name: _with(values, lambda _, __: None) for name, values in named.items()}
    state = policy.storage.values_of_all(plain)
    for name, values in named.items():
        state[name] = _with(values, partial(_share, policy, name))
    groups = zip(packed["param_groups"], policy.groups, strict=True)
    return {**packed, "state": state, "param_groups": [{**group, "params": names} for group, names in groups]}


def load_optimizer_state(policy: Policy, saved: Mapping[str, Any]) -> None:
    """Load this rank's part of a saved optimizer state."""
    if [group["params"] for group in saved["param_groups"]] != policy.groups:
        raise UserError(
            f"player '{policy.player.name}': the checkpoint's optimizer has its weights in other groups than this "
            f"run's; resume with the settings it was trained with"
        )
    wanted: dict[SavedTensor, Share] = {}
    state = {
        number: _with(saved["state"][name], partial(_room, policy, name, wanted))
        for number, name in enumerate(_stepped(policy))
        if name in saved["state"]
    }
    read(wanted)
    groups, first = [], 0
    for group, own in zip(saved["param_groups"], policy.optimizer.param_groups, strict=True):
        groups.append({**group, "params": list(range(first, first + len(own["params"])))})
        first += len(own["params"])
    policy.optimizer.load_state_dict({**saved, "state": state, "param_groups": groups})


def _stepped(policy: Policy) -> list[str]:
    """The names of the parameters that this rank's optimizer steps, in the order in which torch numbers them."""
    names = {id(parameter): name for name, parameter in policy.owned.items()}
    return [names[id(parameter)] for group in policy.optimizer.param_groups for parameter in group["params"]]


def _with(values: dict[str, Any], make: Callable[[str, Any], Any]) -> dict[str, Any]:
    """An optimizer's state of one weight, with `make(key, tensor)` in place of each tensor, also in lists and dicts."""
    return {key: tree_map_only((Tensor, SavedTensor), partial(make, key), value) for key, value in values.items()}


def _share(policy: Policy, name: str, key: str, value: Tensor) -> Share:
    return policy.storage.share_of(name, value) if policy.storage.per_element(key) else Share.whole(value)


def _room(policy: Policy, name: str, wanted: dict[SavedTensor, Share], key: str, value: SavedTensor) -> Tensor:
    """The memory that a saved tensor will be read to, entered in `wanted`."""
    owned = policy.owned[name]
    if policy.storage.per_element(key):
        share = policy.storage.share_of(name, torch.empty(owned.shape, dtype=value.dtype, device=owned.device))
    else:
        if treats_elements(policy.optimizer) and value.shape not in (owned.shape, torch.Size()):
            raise misfit(value, owned.shape)
        share = Share.whole(value.empty())
    wanted[value] = share
    return share.tensor
