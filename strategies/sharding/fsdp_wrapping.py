"""How FSDP2 gets hold of a network, while the author's modules stay what they are. Private names of FSDP2 are used."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import fully_shard

from strategies.sharding.fsdp_units import Unit
from strategies.sharding.resharded_parameter import ReshardedParameter


def wrap(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    parameters: Mapping[str, nn.Parameter],
    learning: Collection[str],
    before_call: Callable[[nn.Module], None],
    hooks_on: Callable[[], bool],
    settings: Mapping[str, Any],
) -> tuple[list[Unit], list[Any]]:
    """Let FSDP2 shard these parameters of a network. Returns the units, that of the root first, and hooks to remove.

    Each block is a unit of its own; the root's has what is left. FSDP2's hooks work while `hooks_on()`, and
    `before_call` comes before them. When this returns, the modules are as they were, but for hooks: they have the
    author's parameters and their own classes. `settings` are those of torch's `fully_shard`.
    """
    classes = {module: type(module) for module in (*blocks, root)}
    with _stand_ins(root, blocks, parameters) as (authors, ignored, tied):
        for block in blocks:
            fully_shard(block, ignored_params=ignored | tied, **settings)
        fully_shard(root, ignored_params=ignored, **settings)
        states = {module: fully_shard.state(module) for module in (root, *blocks)}
        for state in states.values():
            for group in _groups(state):
                _give_memory(group)
        states[root]._lazy_init()
    hooks = []
    for module, state in states.items():
        module.__class__ = classes[module]
        _module_state_mapping.pop(module, None)
        hooks += _hooks(module, state, before_call, hooks_on)
    for module in root.modules():
        for key in (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            vars(module).pop(key, None)
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups = [(state, group) for state in states.values() for group in _groups(state)]
    return [Unit(state, group, names, authors, learning) for state, group in groups], hooks


@contextmanager
def _stand_ins(
    root: nn.Module, blocks: Sequence[nn.Module], parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[dict[nn.Module, dict[str, nn.Parameter]], set[nn.Parameter], set[nn.Parameter]]]:
    """Inside the `with`, other parameters are in the places of the author's. FSDP2 may replace these.

    They have at least one dimension, and are contiguous: FSDP2 asks for it. A parameter of several blocks is also put
    into the root, under a made-up name, because FSDP2 looks for the root's parameters outside of blocks only. The
    values are the author's parameters by module and name, the parameters that are not to be sharded, and those of
    several blocks.
    """
    own = {id(parameter): parameter for parameter in parameters.values()}
    authors = {
        module: {name: each for name, each in module._parameters.items() if id(each) in own}
        for module in root.modules()
    }
    made = {key: _stand_in(each) for key, each in own.items()}
    added = {f"of_several_blocks_{number}": own[key] for number, key in enumerate(_tied(authors, blocks))}
    authors[root] |= added
    for module, there in authors.items():
        _set(module, {name: made[id(each)] for name, each in there.items()})
    stand_ins = set(made.values())
    try:
        tied = {made[id(each)] for each in added.values()}
        yield authors, {each for each in root.parameters() if each not in stand_ins}, tied
    finally:
        for module, there in authors.items():
            _set(module, there)
        for name in added:
            del root._parameters[name]


def _stand_in(weight: nn.Parameter) -> nn.Parameter:
    if isinstance(weight, ReshardedParameter):  # it has no values yet; FSDP2 knows that of the meta device only
        values = torch.empty(weight.shape or (1,), dtype=weight.dtype, device="meta")
    else:
        values = weight.detach().contiguous().view(weight.shape or (1,))
    return nn.Parameter(values, requires_grad=weight.requires_grad)


def _give_memory(group: Any) -> None:
    """Give memory to the shards of weights that have no values yet. FSDP2's guide does this by `to_empty`."""
    for weight in group.fsdp_params:
        if weight.sharded_param.is_meta:
            device = "cpu" if weight.offload_to_cpu else weight.device
            values = torch.zeros_like(weight.sharded_param.detach(), device=device)
            weight._setattr_on_modules(nn.Parameter(values, requires_grad=weight.sharded_param.requires_grad))


def _set(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Set them as attributes, as FSDP2 does, because torch's RNNs then change the list that they keep too."""
    for name, parameter in parameters.items():
        setattr(module, name, parameter)


def _tied(authors: Mapping[nn.Module, Mapping[str, nn.Parameter]], blocks: Sequence[nn.Module]) -> list[int]:
    """The ids of parameters of several blocks, or of a block and what is outside of all. They belong to the root."""
    inside = [set(block.modules()) for block in blocks]
    owners: dict[int, set[int]] = {}
    for module, there in authors.items():
        numbers = {number for number, modules in enumerate(inside) if module in modules} or {-1}
        for parameter in there.values():
            owners.setdefault(id(parameter), set()).update(numbers)
    return [key for key, numbers in owners.items() if len(numbers) > 1]


def _groups(state: Any) -> list[Any]:
    """The groups of a module; torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def _hooks(
    module: nn.Module, state: Any, before_call: Callable[[nn.Module], None], hooks_on: Callable[[], bool]
) -> list[Any]:
    """FSDP2's hooks of a module, but only while `hooks_on()`: between phases it must gather nothing."""
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before_call(module)
        return state._pre_forward(module, args, kwargs) if hooks_on() else None

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return state._post_forward(module, args, output) if hooks_on() else None

    return [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after),
    ]
