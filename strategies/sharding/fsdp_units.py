"""Units: the parts of a network that torch's FSDP2 gathers and reduces. Private names of FSDP2 are used here."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

from gan.files.checkpoint import Share
from strategies import private
from strategies.sharding.bucket import UNSHARDED, memory_of
from strategies.sharding.resharded_parameter import ReshardedParameter, hide, show
from strategies.sharding.versions import forget_ended, version_of


class FsdpWeight(FSDPParam):
    """What FSDP2 knows of one parameter, and the author's parameter beside it.

    [Note: the author's parameter stays]
    FSDP2 replaces a parameter by a DTensor, and by another parameter while it is gathered. Other modules, hooks and
    variables would keep the old object, with old values. So the module keeps the author's parameter. While FSDP2 has
    gathered it, it uses FSDP2's memory; otherwise reading it is an error (see resharded_parameter.py). Its gradients
    are given to FSDP2's parameter when they are reduced.

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
    begun_sharded: bool  # it had no values when it was sharded

    def adopt(self, unit: "Unit", author: nn.Parameter) -> None:
        self.unit, self.author, self.whole = unit, author, None
        self.begun_sharded = isinstance(author, ReshardedParameter)
        self.shard = self.sharded_param.to_local().detach().view(-1)
        self.piece = nn.Parameter(self.shard, requires_grad=author.requires_grad)
        rank = self.mesh_info.shard_mesh_rank
        self.elements = self.shard.numel()
        self.start = min(rank * self.padded_sharded_param_size.numel(), author.numel())
        self.version = self.seen = 0

    def reset_sharded_param(self) -> None:
        """Do nothing: FSDP2 would take over the module's parameter, which is the author's."""

    def _setattr_on_modules(self, param: nn.Parameter) -> None:
        """FSDP2 calls it when it has gathered the parameter, and before it frees what it has gathered."""
        with private.outside_transforms():
            if param is self.sharded_param:
                self.drop(keep=True)
            else:
                self.use(self.all_gather_outputs[0][: self.author.numel()])
                self.unit.weight_gathered(self)

    def dtype_in(self, exact: bool) -> torch.dtype:
        """Its own dtype, or (not `exact`) the one that phases compute in."""
        return self.orig_dtype if exact else self.param_dtype or self.orig_dtype

    def use(self, whole: Tensor) -> None:
        """Let the author's parameter use this memory."""
        if self.whole is not None:
            UNSHARDED.pop(memory_of(self.whole), None)
        show(self.author, whole)
        self.whole = whole
        if whole.numel():
            UNSHARDED[memory_of(whole)] = self
        self.seen = version_of(self.author)

    def drop(self, keep: bool) -> None:
        """Hide the author's parameter. `keep`: keep what code has written into it."""
        if self.whole is None:
            return
        if keep:
            self.keep_writes()
        UNSHARDED.pop(memory_of(self.whole), None)
        hide(self.author, torch.full((), torch.nan, dtype=self.whole.dtype, device=self.whole.device))
        self.whole = None

    def keep_writes(self) -> None:
        """See [Note: written weights] in bucket.py.

        One more case differs. FSDP2 gathers from the shard on other streams of a GPU, which must wait for a write. So
        in a phase on a GPU only writes that autograd counts are kept.
        """
        if self.whole is None:
            return
        moved = self.author.numel() > 0 and memory_of(self.author) != memory_of(self.whole)
        if moved:  # after `weight.data = ...`
            self.whole.copy_(self.author.detach().reshape(-1))
            show(self.author, self.whole)
        own = self.whole[self.start : self.start + self.elements]
        of_fsdp2 = self.whole.device.type != "cpu" and memory_of(self.whole) == memory_of(self.all_gather_outputs[0])
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
        """Give the author's parameter its own memory. Nothing of FSDP2's stays: it would keep process groups.

        One that has never been whole may not fit, so it stays resharded.
        """
        there = self.whole is not None
        if there:
            UNSHARDED.pop(memory_of(self.whole), None)
        forget_ended(self.author)
        if there or not self.begun_sharded:
            values = self.author.data if there else torch.full(self.author.shape, torch.nan, device=self.device)
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
    backward, and look ahead. With `keep_whole` it stays whole until the phase ends. It is reduced when `reduce_scatter`
    is called, and not by FSDP2's hooks: see `FullyShard`.
    """

    def __init__(
        self,
        state: Any,
        group: Any,
        names: Mapping[int, str],
        authors: Mapping[nn.Module, Mapping[str, nn.Parameter]],
        learning: Collection[str],
    ) -> None:
        """`state` and `group` are FSDP2's. `authors` are the author's parameters, by module and name in the module.

        `names` are those of the author's parameters in the player, by their ids; `learning` the names of those that
        learn.
        """
        self.state, self.group = state, group
        self.everything: dict[str, FsdpWeight] = {}
        self.is_root = bool(state._is_root)  # whether it has the weights outside of blocks
        self.fetch: Callable[[], None] | None = None  # called when autograd needs a weight
        self.on_gathered: Callable[[], None] = lambda: None  # called when FSDP2 has gathered it
        for weight in group.fsdp_params:
            author = authors[weight._module_info.module][weight._module_info.param_name]
            weight._post_load_hook_handle.remove()
            weight.__class__ = FsdpWeight
            weight.adopt(self, author)
            self.everything[names[id(author)]] = weight
        self.learning = [name for name in self.everything if name in learning]
        for hooks in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            while hooks:
                hooks.popitem()[1].remove()
        self.mesh_after_forward = group.post_forward_mesh_info  # None: not after a forward
        group.reduce_grads = False
        # FSDP2 makes its own parameter when it first gathers one. All ranks need it, also one that never reads it.
        self.unshard()
        self.reshard()

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The author's parameters in it that learn."""
        return {name: self.everything[name].author for name in self.learning}

    @property
    def running(self) -> bool:
        """Whether a forward or backward of its module runs, so that FSDP2 takes care of it."""
        return self.group._training_state in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD)

    @property
    def unsharded(self) -> bool:
        return all(weight.whole is not None for weight in self.everything.values())

    def gathered_for(self, module: nn.Module) -> bool:
        """Whether FSDP2 gathers it when this module is called."""
        return module in self.group.modules

    def weight_gathered(self, weight: FsdpWeight) -> None:
        """FSDP2 has gathered one of its weights; the last one comes when all are there."""
        if weight is self.group.fsdp_params[-1]:
            self.on_gathered()

    def start_unshard(self) -> None:
        """Start to gather the weights. Who reads them first waits."""
        self.group.unshard(async_op=True)

    def unshard(self) -> None:
        """Gather the weights in the dtype that phases compute in."""
        self.group.unshard()
        self.group.wait_for_unshard()

    @property
    def device(self) -> torch.device:
        return next(iter(self.everything.values())).device

    def copy_whole(self, dtype: torch.dtype) -> None:
        """Gather the weights by one all-gather into other memory than FSDP2's. The unit is resharded.

        FSDP2 resizes its memory, and cannot once code has a numpy view of it.
        """
        weights = list(self.everything.values())
        own = torch.cat([weight._sharded_param_data for weight in weights])
        own = own.to(self.device, dtype)
        group = weights[0].mesh_info.shard_process_group
        of_ranks = own.new_empty(group.size(), own.numel())
        dist.all_gather_into_tensor(of_ranks.view(-1), own, group=group)
        sizes = [weight._sharded_param_data.numel() for weight in weights]
        for weight, rows in zip(weights, of_ranks.split(sizes, 1), strict=True):
            whole = rows.reshape(-1)[: weight.author.numel()]
            weight.use(whole.clone(memory_format=torch.contiguous_format))

    def keep_whole(self) -> None:
        """Let FSDP2 free nothing of it until `end_phase`."""
        self.group.post_forward_mesh_info, self.group.reshard_after_backward = None, False

    def end_phase(self) -> None:
        """Reshard it, and clear the bookkeeping that FSDP2 clears after a backward. A phase may have none."""
        self.reshard()
        context = self.group.comm_ctx
        self.group.finalize_backward()
        context.post_forward_order.clear()
        if hasattr(context, "reduce_scatter_states"):
            context.reduce_scatter_states.clear()
        else:  # torch 2.11
            context.reduce_scatter_state = None
        self.group.post_forward_mesh_info, self.group.reshard_after_backward = self.mesh_after_forward, True

    def reshard(self) -> None:
        """Keep only the shard. Reading a weight is an error from now on."""
        self.group.wait_for_unshard()  # of what is on its way
        self.group._training_state = self.state._training_state = TrainingState.IDLE
        self.group.reshard()
        for weight in self.everything.values():
            weight.drop(keep=True)  # what `copy_whole` has gathered

    def shards_changed(self, names: Collection[str]) -> None:
        """Drop the whole weights of these names, because their shards are newer."""
        self.group.wait_for_unshard()  # what is on its way is old too
        for name, weight in self.everything.items():
            weight.drop(keep=name not in names)
            weight.version += name in names
        self.reshard()

    def reduce_scatter(self) -> "UnitReduction":
        """Start to average the gradients of the weights that learn over the ranks, and drop them."""
        group = self.group
        for name in self.learning:
            weight = self.everything[name]
            mine, gradient = weight.unsharded_param, weight.author.grad
            dtype = getattr(mine, "grad_dtype", mine.dtype) or weight.orig_dtype
            if gradient is None:
                mine.grad = torch.zeros(mine.shape, dtype=dtype, device=mine.device)
            else:
                mine.grad = gradient.to(dtype).reshape(mine.shape).contiguous()
            weight.author.grad = None
        before = group._training_state, group.reshard_after_backward
        group.reduce_grads, group.reshard_after_backward = True, False
        group.post_backward()
        group.reduce_grads = False
        group._training_state, group.reshard_after_backward = before
        return UnitReduction(self)

    def release(self) -> None:
        """Give every parameter its own memory. Communicates nothing, so a sharded one becomes NaN.

        Units and torch's objects refer to each other, so what leads to a process group is cleared.
        """
        for weight in self.everything.values():
            weight.release()
        self.group.mesh_info = self.group.post_forward_mesh_info = self.mesh_after_forward = None
        self.state = self.group = self.fetch = self.on_gathered = None


class UnitReduction:
    """A running reduction of a unit's gradients."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def wait(self) -> None:
        """FSDP2 itself limits how many are on their way."""

    def give(self, scale: float) -> None:
        """Give each piece its part of the mean, divided by the scale."""
        self.unit.group._wait_for_post_backward()  # FSDP2 reduces on streams of its own, for which ours waits
        for name in self.unit.learning:
            weight = self.unit.everything[name]
            if weight.grad_offload_event is not None:  # on its way to the CPU
                weight.grad_offload_event.synchronize()
                weight.grad_offload_event = None
            own = weight.sharded_param.grad.to_local().view(-1)
            weight.piece.grad = own if scale == 1 else own.mul_(1 / scale)
            weight.sharded_param.grad = None
