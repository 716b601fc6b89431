"""What the zero policies have in common: each rank owns a share of every player's elements."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from gan.errors import UserError
from gan.phase import Player
from strategies.bucket import Bucket, Sharing, buckets
from strategies.policy import Policy, World

# Optimizers that treat every element by itself, so that on pieces of weights they do what they do on weights.
ELEMENTWISE = {
    getattr(optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adadelta", "Rprop")
}
SCALARS = {"step", "mu_product"}  # what those keep for a weight as one number


class Owner(Policy):
    """Optimizer and average work on this rank's pieces of the weights. See [Note: shares of elements].

    Options: `offload` keeps all that this rank owns, and steps it, in the CPU's memory. `hybrid` shares within a node,
    or among N neighbours, and keeps a copy in each of these groups: what is gathered stays within it, gradients are
    averaged over all.

    By hand, because torch's ZeroRedundancyOptimizer deals out whole weights, which leaves ranks with unequal loads.
    What a recipe decides by a weight's name or shape, such as groups of parameters, it decides on the weights
    themselves: the optimizer is made for those, and gets the pieces in their stead before its first step.
    """

    max_ranks = None
    takes = Policy.takes | {"offload", "hybrid"}
    keep = True

    def __init__(self, player: Player, world: World, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(player, world, options)
        self.buckets: list[Bucket] = []
        self.groups: list[list[str]] = []
        self.stale = False

    @property
    def alone(self) -> bool:
        """Whether there is nobody to share with, so that this is a policy of one device."""
        return self.world.size == 1

    # ---- the verbs ----

    @cached_property
    def sharing(self) -> Sharing:
        """Among all ranks, or (hybrid) among neighbours, those of a node if no number is said."""
        size, rank, group, copies = self.world.size, self.world.rank, self.group, None
        if self.mesh is not None:
            size, rank = self.mesh["shares"].size(), self.mesh.get_local_rank("shares")
            group, copies = self.mesh.get_group("shares"), self.mesh.get_group("copies")
        return Sharing(
            size,
            rank,
            group,
            copies,
            self.keep,
            home=torch.device("cpu") if "offload" in self.options else None,
            shown=torch.bfloat16 if "bf16" in self.options else None,
        )

    @cached_property
    def mesh(self) -> DeviceMesh | None:
        """Ranks in rows of those who share, columns of those who own the same; none where all share."""
        if "hybrid" not in self.options:
            return None
        size, all_ = self.options["hybrid"] or self.world.local, self.world.size
        if all_ % size:
            raise UserError(
                f"player '{self.player.name}': {all_} ranks cannot be parted into groups of {size}, as "
                f"'{self.name}+hybrid:{size}' asks; type {self.name}+hybrid:N with an N that divides {all_}"
            )
        if size == all_:
            return None
        return init_device_mesh(self.world.device.type, (all_ // size, size), mesh_dim_names=("copies", "shares"))

    def cut(self) -> None:
        """Lay the weights into buckets, and own a piece of each."""
        if self.alone or not self.weights:
            return
        self.buckets = buckets(self.weights, self.sharing)
        pieces = {name: piece for bucket in self.buckets for name, piece in bucket.pieces.items()}
        self.owned = {name: pieces[name] for name in self.weights if name in pieces}

    def make_optimizer(self) -> Optimizer:
        """Make it for the weights, then let it step on this rank's pieces of them."""
        optimizer = super().make_optimizer()
        if self.alone:
            return optimizer
        if type(optimizer) not in ELEMENTWISE or optimizer.state:
            known = ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))
            raise UserError(
                f"player '{self.player.name}': policy '{self.name}' cuts weights into pieces, and "
                f"{type(optimizer).__name__} on pieces is not known to be what it is on whole weights; "
                f"type --strategy {self.player.name}=ddp,*={self.name}, or use one of {known}"
            )
        names = {id(weight): name for name, weight in self.weights.items()}
        self.groups = [[names[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]
        for group, members in zip(optimizer.param_groups, self.groups, strict=True):
            group["params"] = [self.owned[name] for name in members if name in self.owned]
        return optimizer

    def spread(self) -> None:
        """The shares have changed: show it in the weights. One all-gather a bucket, in place."""
        for bucket in self.buckets:
            bucket.gather()

    def drop_gradients(self) -> None:
        """Neither the weights nor the pieces keep any."""
        super().drop_gradients()
        for piece in self.owned.values():
            piece.grad = None

    def release(self) -> None:
        """The weights are whole, in memory of their own."""
        for bucket in self.buckets:
            bucket.release()
        if self.__dict__.get("mesh") is not None:
            for group in self.mesh.get_all_groups():
                dist.destroy_process_group(group)
        super().release()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the shares and gather; back again afterwards. After an error nobody is waited for."""
        if not self.buckets or self.ema is None:
            with super().averaged():
                yield
            return
        self.stale = True
        with self.ema.swapped():
            self.spread()
            yield
        self.spread()
        self.stale = False

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The weights always are whole, unless an error came between; and now also in their own kind of numbers."""
        if self.stale:
            self.spread()
            self.stale = False
        rounded = [bucket for bucket in self.buckets if bucket.shown != bucket.kind]
        for bucket in rounded:
            bucket.gather(bucket.kind)
        yield
        for bucket in rounded:
            bucket.gather()

    # ---- checkpoints ----

    def took_weights(self) -> None:
        """The shares follow the weights."""
        for bucket in self.buckets:
            bucket.took_weights()

    def average_state(self) -> dict[str, Tensor]:
        """Whole averages, on rank 0."""
        if not self.buckets:
            return super().average_state()
        parts = self._collect(self.ema.state_dict())
        return {
            name: self._whole(name, [part[name] for part in parts if name in part]) for name in self.weights if parts
        }

    def load_average(self, state: Mapping[str, Tensor] | None) -> None:
        """This rank's pieces of saved averages."""
        if self.ema is not None and self.buckets and state is not None:
            state = {name: tensor for name, tensor in self._cut(state).items() if name in self.owned}
        super().load_average(state)

    def optimizer_state(self) -> dict[str, Any]:
        """The ranks' states put together, on rank 0, under the numbers that plain torch gives the weights."""
        if not self.buckets:
            return super().optimizer_state()
        parts = self._collect({name: dict(self.optimizer.state.get(piece, {})) for name, piece in self.owned.items()})
        groups, number, numbers = self.optimizer.state_dict()["param_groups"], 0, {}
        for group, members in zip(groups, self.groups, strict=True):
            group["params"] = list(range(number, number + len(members)))
            numbers |= dict(zip(group["params"], members, strict=True))
            number += len(members)
        state = {}
        for number, name in numbers.items() if parts else ():
            found = [part[name] for part in parts if part.get(name)]
            if found:
                state[number] = {
                    key: self._whole(name, [each[key] for each in found]) if _is_per_element(key, value) else value
                    for key, value in found[0].items()
                }
        return {"state": state, "param_groups": groups}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """This rank's pieces of a saved state of the whole player."""
        if self.buckets:
            numbers = iter(range(len(self.owned)))
            mine, groups = {}, []
            for group, members in zip(state["param_groups"], self.groups, strict=True):
                taken = []
                for saved, name in zip(group["params"], members, strict=True):
                    if name not in self.owned:
                        continue
                    taken.append(next(numbers))
                    if saved in state["state"]:
                        values = state["state"][saved]
                        mine[taken[-1]] = {
                            key: self._cut({name: value})[name].clone() if _is_per_element(key, value) else value
                            for key, value in values.items()
                        }
                groups.append({**group, "params": taken})
            state = {"state": mine, "param_groups": groups}
        super().load_optimizer_state(state)

    def _cut(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        where = {name: bucket for bucket in self.buckets for name in bucket.weights}
        return {name: where[name].cut(name, tensor) for name, tensor in tensors.items()}

    def _whole(self, name: str, parts: list[Tensor]) -> Tensor:
        return torch.cat([part.reshape(-1) for part in parts]).view(self.weights[name].shape)

    def _collect(self, value: Any) -> list[Any]:
        """What each rank has, in the memory of rank 0's machine; nothing on the others."""
        value = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value)
        found = [None] * self.world.size if self.world.rank == 0 else None
        dist.gather_object(value, found, dst=0)
        return (found or [])[: self.sharing.size]


def _is_per_element(key: str, value: Any) -> bool:
    # Not by its shape: a weight may be a scalar, and so are its moments.
    return isinstance(value, Tensor) and key not in SCALARS
