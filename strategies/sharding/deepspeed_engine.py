"""DeepSpeed's engine, as the storage of a player and as the reduction of its gradients."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, autograd, nn
from torch.optim import Optimizer

from gan.files.checkpoint import Share
from gan.files.errors import UserError
from strategies import private
from strategies.sharding.reduce_scatter import norms_of_pieces
from strategies.sharding.reduction import SharedReduction
from strategies.sharding.resharded_parameter import hide, show
from strategies.sharding.storage import Storage
from strategies.sharding.versions import version_of


def package(device: torch.device) -> Any:
    """Import DeepSpeed for this kind of device."""
    logging.getLogger("DeepSpeed").addFilter(_is_error)  # it would print a lot, on every rank
    # DeepSpeed reads this variable when it is imported.
    with mock.patch.dict(os.environ, DS_ACCELERATOR=os.environ.get("DS_ACCELERATOR", device.type)):
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.ops import __compatible_ops__

        # An operation for inference on CPUs. It would be compiled first, and it is not used here.
        __compatible_ops__["deepspeed_shm_comm"] = False
        _forget_old_groups(deepspeed)
        known = torch.device(get_accelerator().device_name()).type
    if known != device.type:
        raise UserError(
            f"DeepSpeed computes on {known} in this process and the run on {device.type}; type "
            f"DS_ACCELERATOR={device.type} in front of the command"
        )
    return deepspeed


def _forget_old_groups(deepspeed: Any) -> None:
    """Reset DeepSpeed if torch has new process groups, because DeepSpeed keeps the first ones that it saw."""
    if getattr(deepspeed, "world_of_phases", dist.group.WORLD) is not dist.group.WORLD:
        deepspeed.comm.comm.cdb = None
        deepspeed.utils.groups._release_process_group_references()
    deepspeed.world_of_phases = dist.group.WORLD


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


DTYPE = torch.float32  # what DeepSpeed computes with


class Engine(Storage):
    """DeepSpeed's engine for twins of some weights. `others` do not learn; stage 3 shards them too.

    [Note: twins]
    DeepSpeed expects that its engine wraps the network. Then it counts the gradients of each weight during the backward
    of its own loss. A second engine in that loss is a KeyError, and a gradient penalty is an IndexError. If the network
    inside is called directly, the weights are silently wrong. So our engine never sees the network. It is made for
    twins: parameters of its own that use the same memory. Phases run on the author's network with plain autograd, and
    the gradients of micro-batches add up in its weights. Then the twins get the gradients, and all of them are reduced
    together (`engine.coalesce_grad_reduction`). So whatever plain torch can differentiate is exact. The price: unlike
    in zero2, there is no reduction while backward still runs.

    [Note: pieces]
    DeepSpeed lays the twins end to end and steps the rank's part as one long weight. That would not equal plain Adam,
    which does not change a weight that the loss did not reach, and counts steps for each weight. So DeepSpeed gets a
    stand-in as its optimizer. The stand-in lets the player's own optimizer step on pieces: views of the rank's part,
    one for each weight, as in the zero policies.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        others: Mapping[str, nn.Parameter],
        stage: int,
        world: Any,
        group: Any,
        config: Mapping[str, Any],
        what: str,
    ) -> None:
        super().__init__(weights)
        deepspeed = package(world.device)
        self.world, self.group, self.what, self.partitioned = world, group, what, stage == 3
        self.everything = {**weights, **others}
        self.twins = {
            name: nn.Parameter(weight.detach().reshape(-1), requires_grad=name in weights)
            for name, weight in self.everything.items()
        }
        learning = [self.twins[name] for name in weights]
        self._players_optimizer: Optimizer | None = None
        local_rank = world.rank if world.device.index is None else world.device.index
        with mock.patch.dict(os.environ, LOCAL_RANK=os.environ.get("LOCAL_RANK", str(local_rank))):
            self.engine, *_ = deepspeed.initialize(
                model=_Twins(self.twins.values()),
                model_parameters=learning,
                optimizer=_StandIn(learning, self._step) if learning else None,
                config=dict(config),
                dist_init_required=False,  # the process group exists already
            )
        private.limit(self.engine.data_parallel_group, world.groups.timeout)
        self.optimizer = self.engine.optimizer
        self._gather = deepspeed.zero.GatheredParameters
        self._whole, self._stale, self._reduced = True, False, False
        self._seen: list[int] = []  # versions of the weights when whole weights and pieces were equal
        if self.partitioned:
            for twin in self.twins.values():
                twin.ds_process_group = group  # its own, because ranks may gather two players in different orders
        self._find_pieces()
        if self.partitioned:
            self._hide()
        else:
            self._show()

    def _find_pieces(self) -> None:
        """Find the piece of each weight in the long weights that the engine steps. See [Note: pieces]."""
        self.places: dict[str, tuple[int, int, int]] = {}  # by name: number of the long weight, offset in it, elements
        self.firsts: dict[str, int] = {}  # by name: the first element of the weight that this rank owns
        rank, names = self.world.rank, {id(twin): name for name, twin in self.twins.items()}
        self.longs: list[Tensor] = []
        if self.partitioned and self.weights:
            self.longs = self.optimizer.fp32_partitioned_groups_flat
            for number, twins in enumerate(self.optimizer.fp16_groups):
                offset = 0
                for twin in twins:
                    name, length = names[id(twin)], twin.partition_numel()
                    self.firsts[name] = rank * length
                    count = min(length, self.weights[name].numel() - rank * length)
                    if count > 0:
                        self.places[name] = (number, offset, count)
                    offset += length
        elif self.weights:
            self.longs = self.optimizer.single_partition_of_fp32_groups
            length, start = self.longs[0].numel(), 0
            for name, weight in self.weights.items():
                low, high = max(start, rank * length), min(start + weight.numel(), (rank + 1) * length)
                self.firsts[name] = low - start
                if low < high:
                    self.places[name] = (0, low - rank * length, high - low)
                start += weight.numel()
        pieces = {
            name: nn.Parameter(self.longs[number].detach()[offset : offset + count])
            for name, (number, offset, count) in self.places.items()
        }
        self.owned = {name: pieces[name] for name in self.weights if name in pieces}
        # The engine has copied the weights there. Check that they are where this code expects them.
        self.misplaced = ""
        for name, piece in self.owned.items():
            first, count = self.firsts[name], self.places[name][2]
            part = self.weights[name].detach().reshape(-1)[first : first + count]
            if not torch.equal(piece.detach(), part.to(piece.device)):
                self.misplaced = name

    # ---- the weights ----

    @property
    def sharded(self) -> bool:
        return bool(self.weights)

    @property
    def unsharded(self) -> bool:
        return not self._stale and (self._whole or not self.partitioned)

    def _show(self) -> None:
        for name, weight in self.everything.items():
            show(weight, self.twins[name].data)
        self._up_to_date()

    def _up_to_date(self) -> None:
        if self._offloaded:
            self._seen = [version_of(weight) for weight in self.everything.values()]

    @property
    def _offloaded(self) -> bool:
        return any(long.device != self.world.device for long in self.longs)

    def keep_writes(self) -> None:
        """See [Note: written weights] in bucket.py. Here the pieces are what the shard is there."""
        if self.engine is None or self._stale or not self._whole:
            return
        moved = False
        for name, weight in () if self.partitioned else self.everything.items():
            twin = self.twins[name].data
            if weight.data_ptr() != twin.data_ptr():  # after `weight.data = ...`
                twin.copy_(weight.detach().reshape(-1))
                show(weight, twin)
                moved = True
        versions = [version_of(weight) for weight in self.everything.values()] if self._offloaded else []
        if self._offloaded and not moved and versions == self._seen:
            return
        for name, weight in self.everything.items() if self.partitioned else self.weights.items():
            self._keep(name, weight.detach().reshape(-1))
        self._up_to_date()

    def _keep(self, name: str, flat: Tensor) -> None:
        """Copy this rank's part of a weight to where the engine has it."""
        share = self._share(name)
        if share is not None:
            part = flat[share.start : share.stop]
            share.tensor.copy_(part)
            if self.partitioned:  # stage 3 gathers from another copy
                self.twins[name].ds_tensor.data[: part.numel()].copy_(part)

    def unshard(self, exact: bool = False) -> None:
        if self.engine is None:
            return
        self.keep_writes()
        if self.partitioned and not self._whole:
            with self._gather(list(self.twins.values())):
                self._show()
            self._whole = True
        elif self._stale:
            self.optimizer.update_lp_params()
        self._stale = False

    def reshard(self) -> None:
        if not self.partitioned:
            self.unshard()
        else:
            self.keep_writes()
            self._hide()

    def _hide(self) -> None:
        if self._whole:
            self._whole = False
            nothing = torch.full((), torch.nan, dtype=DTYPE, device=self.world.device)
            for weight in self.everything.values():
                hide(weight, nothing)

    def shards_changed(self, others: bool = False) -> None:
        if not self.partitioned:
            self._stale = True
            return
        for name, piece in self.owned.items():  # stage 3 gathers from another copy of the shard
            self.twins[name].ds_tensor.data[: piece.numel()].copy_(piece.detach())
        self._hide()

    def shares(self) -> dict[nn.Parameter, Share | None]:
        self.keep_writes()
        known = self.everything if self.partitioned else self.weights
        return {weight: self._share(name) for name, weight in known.items()}

    def share_of(self, name: str, tensor: Tensor) -> Share:
        return replace(self._share(name), tensor=tensor)

    def _share(self, name: str) -> Share | None:
        """This rank's share of a weight, if it has any."""
        weight = self.everything[name]
        if name in self.weights:
            first, count = self.firsts[name], self.places[name][2] if name in self.places else 0
            own = self.owned[name].detach() if count else None
        else:
            twin = self.twins.get(name)
            size = -(-weight.numel() // self.world.size) if twin is None else twin.ds_tensor.numel()
            first = self.world.rank * size
            count = min(size, weight.numel() - first)
            own = None if twin is None or count <= 0 else twin.ds_tensor.data[:count]
        if count <= 0:
            return None
        # After the release only the author's parameter is written to.
        own = weight.detach().reshape(-1)[first : first + count] if self.engine is None else own
        return Share(own, weight.shape, first)

    def release(self) -> None:
        for weight in self.everything.values():
            values = weight.data if self._whole or not self.partitioned else torch.full(weight.shape, torch.nan)
            show(weight, values.to(self.world.device, DTYPE, copy=True))
        self._whole = True
        self.engine.destroy()
        self.engine = self.optimizer = self.group = None
        self.twins, self.longs = {}, []

    # ---- the update ----

    def step(self, optimizer: Optimizer, stepped: Sequence[nn.Parameter]) -> None:
        """Let the engine step. It calls `_step`, and then updates the weights from the result."""
        self._players_optimizer = optimizer
        self.keep_writes()
        self.engine.step()
        self._reduced = False
        if not self.engine.was_step_applied():
            raise UserError(
                f"{self.what}: DeepSpeed did not step, as the norm of all gradients is beyond float32; "
                f"try clip=1.0 or a lower learning rate"
            )
        if self.partitioned:
            self._hide()
        autograd.graph.increment_version(stepped)
        self._up_to_date()

    def _step(self) -> None:
        """DeepSpeed may call it several times in a step. After the first call no gradients are left."""
        if self._players_optimizer is not None:
            self._players_optimizer.step()
        for piece in self.owned.values():
            piece.grad = None

    def drop_reduced(self) -> None:
        """Remove the gradients of a skipped update from the engine, by a step without gradients."""
        if self._reduced:
            self.keep_writes()
            for piece in self.owned.values():
                piece.grad = None
            self.engine.step()
            self._reduced = False

    def reduce(self) -> None:
        """Average the gradients over the ranks, and give the pieces their parts."""
        self.keep_writes()  # before the twins get the weights' memory, which may be other memory by now
        for name, weight in self.weights.items():
            twin, gradient = self.twins[name], weight.grad
            twin.data = weight.data.view(-1)  # in stage 3 it is empty, so it could not have a gradient
            twin.grad = torch.zeros_like(twin) if gradient is None else gradient.reshape(-1)
            weight.grad = None
        with self.engine.coalesce_grad_reduction():
            pass  # on leaving, the gradients of the twins are reduced
        self._reduced = True
        if self.longs[0].device != self.world.device:
            torch.accelerator.synchronize(self.world.device)  # wait until the gradients are on the CPU
        if self.partitioned:
            for twin in self.twins.values():
                twin.data = twin.data.new_empty(0)
        found: dict[tuple[int, int], Tensor] = {}
        for number, long in enumerate(self.longs):
            offset = 0
            for part in [long.grad] if long.grad is not None else self.optimizer.averaged_gradients[number]:
                found[number, offset] = part.view(-1)
                offset += part.numel()
        for name, piece in self.owned.items():
            number, offset, count = self.places[name]
            whole = found.get((number, offset))
            piece.grad = found[number, 0][offset : offset + count] if whole is None else whole[:count]


class EngineReduction(SharedReduction):
    """The engine reduces after the last backward. Norms, and weights that were not reached, are as in zero2."""

    def finish(self, scale: float) -> Tensor:
        self.reached = {name for name, weight in self.storage.weights.items() if weight.grad is not None}
        self.storage.drop_reduced()
        self.storage.reduce()
        gradients = [piece.grad for piece in self.storage.owned.values()]
        if scale != 1 and gradients:
            torch._foreach_mul_(gradients, 1 / scale)
        return self.norms()

    def norms(self) -> Tensor:
        return norms_of_pieces(self.storage, self.group, self.device)


class _Twins(nn.Module):
    """Parameters without a network."""

    def __init__(self, twins: Any) -> None:
        super().__init__()
        self.twins = nn.ParameterList(twins)


class _StandIn(Optimizer):
    """The optimizer that DeepSpeed gets. See [Note: pieces]."""

    def __init__(self, twins: list[nn.Parameter], step: Any) -> None:
        super().__init__(twins, {"lr": 0.0})
        self.let_step = step

    def step(self, closure: None = None) -> None:
        self.let_step()
