"""fsdp played dry: torch's FSDP2 itself works on fake tensors, in modules that have weights and compute nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gan.phase import Phase
from strategies import private
from strategies.cost import trace as kinds
from strategies.cost.dry import Dry
from strategies.cost.trace import Event
from strategies.policies.fsdp import Fsdp
from strategies.sharding.fsdp_units import Unit
from strategies.sharding.fully_shard import mesh_of


class Empty(nn.Module):
    """A block, or the network of blocks, as far as FSDP2 asks for it."""

    def forward(self) -> None:
        """Compute nothing."""


class Units(Dry):
    """A player under fsdp. Its calls are told to the hooks of FSDP2, and its backward to FSDP2's groups."""

    device = torch.device("cpu")  # FSDP2 refuses the meta device

    def __init__(self, policy: Fsdp, phases: Sequence[Phase]) -> None:
        self.fake, self.gloo = FakeTensorMode(allow_non_fake_inputs=True), policy.world.device.type == "cpu"
        super().__init__(policy, phases)
        self.storage = self.policy.storage
        self.storage.agreed = set(self.phases)  # there is no other rank to agree with
        self.calls: list[Empty | None] = []  # the running forwards, and which of them FSDP2 knows
        self.backward_of: Unit | None = None
        self.recomputing = False

    @contextmanager
    def without_values(self) -> Iterator[None]:
        with self.fake, private.fsdp_memory(self.count):
            yield

    def count(self, more: int) -> None:
        """FSDP2 has given memory to gathered weights, or freed it, without an operation."""
        here = self.living.here
        here.alive += more
        here.highest = max(here.highest, here.alive)

    def saw_collective(self, name: str, args: list[Any]) -> None:
        super().saw_collective(name, args)
        if "reduce_scatter" in name and self.gloo:
            self.count(args[1].nbytes)  # gloo reduces in a copy of its own, and FSDP2 waits for it at once
            self.count(-args[1].nbytes)

    def prepare(self, policy: Fsdp) -> None:
        network, blocks = Empty(), policy.blocks()
        self.empty_of = {policy.player.module: network}
        for block in blocks:
            self.empty_of[block] = Empty()
            network.add_module(str(len(self.empty_of)), self.empty_of[block])
        place: dict[int, Empty] = {}
        for block in blocks:
            for each in block.parameters():  # a weight of several blocks belongs to none
                place[id(each)] = network if id(each) in place else self.empty_of[block]
        for key, copy in self.copy_of.items():
            place.get(key, network).register_parameter(str(key), copy)
        made = self.policy
        made.player, made.blocks = replace(policy.player, module=network), lambda: list(network.children())
        made.mesh = mesh_of(made.sharing.group, self.device) if made.mesh is None else made.mesh
        with self.fake:
            made.storage = made.make_storage()
            made.reduction = made.make_reduction()

    def stored(self) -> list[Tensor]:
        """Also what FSDP2 gathers into, whose size it changes."""
        weights = self.policy.storage.everything.values()
        return [*super().stored(), *(each for weight in weights for each in weight.all_gather_outputs)]

    def read_or_call(self, event: Event) -> None:
        if event.kind == kinds.ENTER:
            self.calls.append(self.empty_of.get(event.what))
            for hook in self.calls[-1]._forward_pre_hooks.values() if self.calls[-1] else ():
                hook(self.calls[-1], (), {})
        elif event.kind == kinds.LEAVE:
            called = self.calls.pop()
            for hook in called._forward_hooks.values() if called else ():
                hook(called, (), None)
        elif event.kind == kinds.AGAIN:
            self.recomputing = True
        elif event.kind == kinds.NEED:
            self.need([event.what])
        elif self.recomputing:  # FSDP2 has gathered it for the block's backward
            self.need(event.what)
        else:
            self.storage._read([self.copy_of[key] for key in event.what if key in self.copy_of])

    def need(self, weights: Sequence[int]) -> None:
        """Backward comes to a unit: the one before is freed, and FSDP2 gathers ahead."""
        for key in weights:
            unit = self.storage.unit_of[id(self.copy_of[key])] if key in self.copy_of else None
            if unit is None or unit is self.backward_of:
                continue
            if not self.storage.hooks_on:
                unit.fetch()
                continue
            if self.backward_of is not None:
                self.backward_of.group.post_backward()
            self.backward_of = unit
            unit.group.pre_backward(True)

    def begin(self, phase: Phase) -> None:
        self.recomputing, self.backward_of = False, None
        super().begin(phase)

    def backward(self, last: bool) -> None:
        self.recomputing = False
        super().backward(last)
