"""Units: the parts of a network that torch's FSDP2 gathers and reduces. All private names of FSDP2 are used here."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from gan.checkpoint import Share
from strategies import private
from strategies.sharding.bucket import UNSHARDED
from strategies.sharding.resharded_parameter import hide, show
from strategies.sharding.versions import forget_ended, version_of


class Weight(FSDPParam):
    """What FSDP2 knows of one parameter, and the author's parameter beside it.

    [Note: the author's parameter stays]
    FSDP2 puts a DTensor in the place of a parameter, and a second parameter in its place while that is gathered. Then
    other players' modules, hooks and variables would still have the author's one, with old values. So the module keeps
    the author's parameter. While FSDP2 has gathered it, it uses FSDP2's memory; otherwise reading it is an error (see
    resharded_parameter.py). Its gradients are given to FSDP2's parameter when they are reduced.

    FSDP2 makes its objects itself, so `Unit` changes their class to this one.
    """

    unit: "Unit"
    author: nn.Parameter
    whole: Tensor | None  # the flat memory of all its values, if they are here
    shard: Tensor | None  # flat: the rows that this rank owns
    elements: int  # in the shard
    piece: nn.Parameter  # the same memory, for the optimizer
    start: int  # of the shard, in elements of the whole
    version: int  # how often the shards have changed
    seen: int  # the author's version when whole values and shard were equal

    def adopt(self, unit: "Unit", author: nn.Parameter) -> None:
        self.unit, self.author, self.whole = unit, author, None
        self.shard = self.sharded_param.to_local().detach().view(-1)
        self.piece = nn.Parameter(self.shard, requires_grad=author.requires_grad)
        rank = self.mesh_info.shard_mesh_rank
        self.elements = self.shard.numel()
        self.start = min(rank * self.padded_sharded_param_size.numel(), author.numel())
        self.version = self.seen = 0

    def reset_sharded_param(self) -> None:
        """FSDP2 would take what the module has, which is the author's parameter."""

    def _setattr_on_modules(self, param: nn.Parameter) -> None:
        """FSDP2 calls it when it has gathered the parameter, and before it frees what it has gathered."""
        with private.outside_transforms():
            if param is self.sharded_param:
                self.drop(keep=True)
            else:
                self.use(self.all_gather_outputs[0][: self.author.numel()])
                self.unit.gathered(self)

    def use(self, whole: Tensor) -> None:
        """Let the author's parameter use this memory."""
        show(self.author, whole)
        self.whole = whole
        if whole.numel():
            UNSHARDED[whole.data_ptr()] = self
        self.seen = version_of(self.author)

    def drop(self, keep: bool) -> None:
        """Hide the author's parameter. `keep`: keep what code has written into it."""
        if self.whole is None:
            return
        if keep:
            self.keep_writes()
        UNSHARDED.pop(self.whole.data_ptr(), None)
        hide(self.author, torch.full((), torch.nan, dtype=self.whole.dtype, device=self.whole.device))
        self.whole = None

    def keep_writes(self) -> None:
        """See [Note: written weights] in bucket.py.

        One more case differs. FSDP2 gathers from the shard on other streams of a GPU, which must wait for a write. So
        in a phase on a GPU only writes that autograd counts are kept.
        """
        if self.whole is None:
            return
        moved = self.author.numel() > 0 and self.author.data_ptr() != self.whole.data_ptr()
        if moved:  # after `weight.data = ...`
            self.whole.copy_(self.author.detach().reshape(-1))
            show(self.author, self.whole)
        own = self.whole[self.start : self.start + self.elements]
        of_fsdp2 = self.whole.device.type != "cpu" and self.whole.data_ptr() == self.all_gather_outputs[0].data_ptr()
        if of_fsdp2 or own.device != self.shard.device:
            if not moved and self.seen == version_of(self.author):
                return
            own = own.to(self.shard.device)
        if own.dtype != self.shard.dtype:
            own = torch.where(own == self.shard.to(own.dtype), self.shard, own.to(self.shard.dtype))
        self.shard.copy_(own)
        self.seen = version_of(self.author)
        if of_fsdp2:
            context, stream = self.unit.group.comm_ctx, torch.accelerator.current_stream()
            context.all_gather_copy_in_stream.wait_stream(stream)
            context.all_gather_stream.wait_stream(stream)

    def share(self) -> Share | None:
        """This rank's share of the weight, if it has any."""
        if not self.elements:
            return None
        own = self.shard
        if own is None:  # after the release only the author's parameter is written to
            own = self.author.detach().reshape(-1)[self.start : self.start + self.elements]
        return Share(own, self.author.shape, self.start)

    def release(self) -> None:
        """Give the author's parameter its own memory. Nothing of FSDP2's stays: it would keep process groups."""
        there = self.whole is not None
        values = self.author.data if there else torch.full(self.author.shape, torch.nan, device=self.device)
        if there:
            UNSHARDED.pop(self.whole.data_ptr(), None)
        forget_ended(self.author)
        show(self.author, values.to(self.shard.dtype, copy=True, memory_format=torch.contiguous_format))
        kept = {"author": self.author, "start": self.start, "elements": self.elements, "whole": None, "shard": None}
        vars(self).clear()
        vars(self).update(kept)

    # ---- for saved_tensors.py ----

    def fetch(self) -> None:
        """Autograd needs the values."""
        self.unit.fetch()

    def version_at(self, _: int) -> int:
        """How often the weight has changed, by updates and by code that wrote it."""
        return self.version + version_of(self.author)


class Unit:
    """Some parameters of a player that FSDP2 gathers together: those of a block, or those outside of all blocks.

    In a phase FSDP2's own hooks gather it before the module's forward, free it after that, gather it again before its
    backward, and look ahead. `hold` lets it stay whole until the phase ends. It is reduced when `reduce_scatter` is
    called, and not by FSDP2's hooks: see `FullyShard`.
    """

    def __init__(
        self, state: Any, group: Any, names: Mapping[int, str], authors: Mapping[nn.Module, Mapping[str, nn.Parameter]]
    ) -> None:
        """`names` are those of the author's parameters, by id; `authors` are they, by module and name in it."""
        self.state, self.group = state, group
        self.parts: dict[str, Weight] = {}
        self.of_root = bool(state._is_root)  # whether it has the weights outside of blocks
        self.number = 0  # among the player's units
        self.learning: Collection[str] = ()
        self.fetch: Callable[[], None] = self.unshard
        self.told: Callable[[], None] = lambda: None  # called when it is gathered in a phase
        for part in group.fsdp_params:
            author = authors[part._module_info.module][part._module_info.param_name]
            part._post_load_hook_handle.remove()
            part.__class__ = Weight
            part.adopt(self, author)
            self.parts[names[id(author)]] = part
        for hooks in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            while hooks:
                hooks.popitem()[1].remove()
        self.reshards = group.post_forward_mesh_info  # None: not after a forward
        group.reduce_grads = False
        # FSDP2 makes its own parameter when it first gathers one. All ranks need it, also one that never reads it.
        self.unshard()
        self.reshard()

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The author's parameters in it that learn."""
        return {name: self.parts[name].author for name in self.learning}

    @property
    def running(self) -> bool:
        """Whether a forward or backward of its module runs, so that FSDP2 takes care of it."""
        return self.group._training_state in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)

    @property
    def unsharded(self) -> bool:
        return all(part.whole is not None for part in self.parts.values())

    def whole_in(self, exact: bool) -> bool:
        """Whether it is whole in its own dtype, or (not `exact`) in the one that phases compute in."""
        kinds = ((p.whole, p.orig_dtype if exact else p.param_dtype or p.orig_dtype) for p in self.parts.values())
        return all(whole is not None and whole.dtype == kind for whole, kind in kinds)

    def gathered(self, part: Weight) -> None:
        if part is self.group.fsdp_params[-1]:
            self.told()

    def start_unshard(self) -> None:
        """Start to gather the weights. Who reads them first waits."""
        self.group.unshard(async_op=True)

    def unshard(self) -> None:
        """Gather the weights in the dtype that phases compute in."""
        self.group.unshard()
        self.group.wait_for_unshard()

    def copy_whole(self, exact: bool) -> None:
        """Gather the weights into memory of their own, by one all-gather. FSDP2 has to resize its memory, and cannot
        once code has a numpy view of it. `exact`: in their own dtype, also where phases compute in another one.
        """
        self.reshard()
        parts = list(self.parts.values())
        kind = parts[0].orig_dtype if exact else parts[0].param_dtype or parts[0].orig_dtype
        own = torch.cat([part._sharded_param_data for part in parts]).to(parts[0].device, kind)
        group = parts[0].mesh_info.shard_process_group
        rows = own.new_empty(group.size(), own.numel())
        dist.all_gather_into_tensor(rows.view(-1), own, group=group)
        for part, each in zip(parts, rows.split([part._sharded_param_data.numel() for part in parts], 1), strict=True):
            part.use(each.reshape(-1)[: part.author.numel()].clone(memory_format=torch.contiguous_format))

    def hold(self) -> None:
        """Let FSDP2 free nothing of it until `end_phase`."""
        self.group.post_forward_mesh_info, self.group.reshard_after_backward = None, False

    def end_phase(self) -> None:
        """Free it, and end what FSDP2 itself ends after a backward only: not every phase has one of this player."""
        self.reshard()
        context = self.group.comm_ctx
        self.group.finalize_backward()
        context.post_forward_order.clear()
        if hasattr(context, "reduce_scatter_states"):
            context.reduce_scatter_states.clear()
        else:  # torch 2.11
            context.reduce_scatter_state = None
        self.group.post_forward_mesh_info, self.group.reshard_after_backward = self.reshards, True

    def reshard(self) -> None:
        """Keep only what this rank owns. Reading a weight is an error from now on."""
        self.group.wait_for_unshard()  # of what FSDP2 has begun to gather ahead
        self.group._training_state = self.state._training_state = TrainingState.IDLE
        self.group.reshard()
        for part in self.parts.values():
            part.drop(keep=True)  # what `copy_whole` has gathered

    def shards_changed(self, names: Collection[str]) -> None:
        """Drop the whole weights, because the shards are newer."""
        for name, part in self.parts.items():
            part.drop(keep=name not in names)
            part.version += name in names
        self.reshard()

    def reduce_scatter(self) -> "UnitReduction":
        """Start to average the gradients of the weights that learn over the ranks, and drop them."""
        group = self.group
        for name in self.learning:
            part = self.parts[name]
            mine, gradient = part.unsharded_param, part.author.grad
            dtype = getattr(mine, "grad_dtype", mine.dtype) or part.orig_dtype
            zeros = torch.zeros(mine.shape, dtype=dtype, device=mine.device)
            mine.grad = zeros if gradient is None else gradient.to(dtype).reshape(mine.shape).contiguous()
            part.author.grad = None
        before = group._training_state, group.reshard_after_backward
        group.reduce_grads, group.reshard_after_backward = True, False
        group.post_backward()
        group.reduce_grads = False
        group._training_state, group.reshard_after_backward = before
        return UnitReduction(self)

    def release(self) -> None:
        """Give every parameter its own memory. Communicates nothing, so a sharded one becomes NaN."""
        for part in self.parts.values():
            part.release()
        self.group.mesh_info = self.group.post_forward_mesh_info = self.reshards = None  # it is in circles
        self.state = self.group = self.fetch = self.told = None


class UnitReduction:
    """A running reduction of a unit's gradients."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def wait(self) -> None:
        """FSDP2 itself limits how many are on their way."""

    def give(self, scale: float) -> None:
        """Give each piece its part of the mean, divided by the scale."""
        for name in self.unit.learning:
            part = self.unit.parts[name]
            own = part.sharded_param.grad.to_local().view(-1)
            part.piece.grad = own if scale == 1 else own.mul_(1 / scale)
            part.sharded_param.grad = None


def wrap(
    root: nn.Module,
    blocks: Sequence[nn.Module],
    parameters: Mapping[str, nn.Parameter],
    playing: Callable[[], bool],
    **settings: Any,
) -> tuple[list[Unit], list[Any]]:
    """Let FSDP2 shard these parameters of a network. Returns the units, that of the root first, and hooks to remove.

    Each block is a unit of its own; the root's has what is left. FSDP2's hooks work while `playing()`. When this
    returns, the modules are as they were, but for hooks: they have the author's parameters and their own classes.
    """
    classes = {module: type(module) for module in (*blocks, root)}
    with _stand_ins(root, blocks, parameters) as (authors, ignored, tied):
        for block in blocks:
            fully_shard(block, ignored_params=ignored | tied, **settings)
        fully_shard(root, ignored_params=ignored, **settings)
        states = {module: fully_shard.state(module) for module in (root, *blocks)}
        states[root]._lazy_init()
    hooks = []
    for module, state in states.items():
        module.__class__ = classes[module]
        _module_state_mapping.pop(module, None)
        hooks += _hooks(module, state, playing)
    for module in root.modules():
        for key in (STATE_KEY, REGISTRY_KEY, "_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            vars(module).pop(key, None)
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [Unit(state, group, names, authors) for state in states.values() for group in _groups(state)], hooks


@contextmanager
def _stand_ins(
    root: nn.Module, blocks: Sequence[nn.Module], parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[dict[nn.Module, dict[str, nn.Parameter]], set[nn.Parameter], set[nn.Parameter]]]:
    """Inside the `with`, other objects stand in the author's places, which FSDP2 may replace.

    They have at least one dimension, and are contiguous: FSDP2 asks for it. Those of several blocks stand in the root
    too, because FSDP2 does not look for the root's in blocks. The values are the author's parameters by module and
    name, the parameters that are not to be sharded, and those of several blocks.
    """
    own = {id(parameter): parameter for parameter in parameters.values()}
    authors = {
        module: {name: each for name, each in module._parameters.items() if id(each) in own}
        for module in root.modules()
    }
    made = {
        key: nn.Parameter(each.detach().contiguous().view(each.shape or (1,)), requires_grad=each.requires_grad)
        for key, each in own.items()
    }
    added = {f"of_several_blocks_{number}": own[key] for number, key in enumerate(_tied(authors, blocks))}
    authors[root] |= added
    for module, there in authors.items():
        module._parameters.update({name: made[id(each)] for name, each in there.items()})
    stand_ins = set(made.values())
    try:
        tied = {made[id(each)] for each in added.values()}
        yield authors, {each for each in root.parameters() if each not in stand_ins}, tied
    finally:
        for module, there in authors.items():
            module._parameters.update(there)
        for name in added:
            del root._parameters[name]


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


def _hooks(module: nn.Module, state: Any, playing: Callable[[], bool]) -> list[Any]:
    """FSDP2's hooks of a module, but only while `playing()`: between phases it must gather nothing."""
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return state._pre_forward(module, args, kwargs) if playing() else None

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return state._post_forward(module, args, output) if playing() else None

    return [
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        module.register_forward_hook(after),
    ]
