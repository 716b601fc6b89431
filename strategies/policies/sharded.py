"""What the zero policies have in common: each rank owns a share of every player's elements."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from gan.checkpoint import Share
from gan.errors import UserError
from gan.phase import Player
from strategies.policies.policy import Policy, World
from strategies.sharding.bucket import Bucket, Sharing, buckets

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
        self.buckets = self.lay_out()
        pieces = {name: piece for bucket in self.buckets for name, piece in bucket.pieces.items()}
        self.owned = {name: pieces[name] for name in self.weights if name in pieces}

    def lay_out(self) -> list[Bucket]:
        """The weights that learn in buckets."""
        return buckets(self.weights, self.sharing)

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

    def settle(self) -> None:
        """In full, where phases compute with fewer digits."""
        for bucket in self.buckets:
            if bucket.shown != bucket.kind:
                bucket.gather(bucket.kind)

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

    def shares(self) -> dict[nn.Parameter, Share | None]:
        """This rank's piece of each weight in a bucket."""
        return {weight: bucket.share_of(name) for bucket in self.dealt for name, weight in bucket.weights.items()}

    @property
    def dealt(self) -> list[Bucket]:
        """All that is laid in buckets."""
        return self.buckets

    def loaded(self) -> None:
        """Show the shares in the weights."""
        self.spread()

    def group_names(self) -> list[list[str]]:
        """As the recipe made the groups, of all ranks' weights."""
        return self.groups if self.buckets else super().group_names()

    def owned_share(self, name: str, tensor: Tensor) -> Share:
        """It lies in the weight as the piece does."""
        for bucket in self.buckets:
            if name in bucket.weights:
                return replace(bucket.share_of(name), tensor=tensor)
        return super().owned_share(name, tensor)

    def is_per_element(self, key: str) -> bool:
        """Not by its shape: a weight may be a scalar, and so are its moments."""
        return bool(self.buckets) and key not in SCALARS
