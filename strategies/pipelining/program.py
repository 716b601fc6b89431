"""The author's forward of a network, run for the stages of one rank."""

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from gan import noise, ranks
from gan.files.errors import UserError, explained
from strategies.advice import type_instead
from strategies.batches import random_state
from strategies.pipelining.cutting import Unit
from strategies.pipelining.pipe import Meta, Pipe, UnitCall, refuse_checkpoint
from strategies.sharding.resharded_parameter import version_of

CARRIED = (Tensor, int, float, str, bool, type(None), torch.dtype, torch.device)  # types that a call takes and returns
WITH_A_VALUE = frozenset(("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"))
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
WHERE = tuple(vars(torch._C.TensorBase)[name].__get__ for name in ("device", "is_cpu", "is_cuda", "is_meta"))
WHERE += (Tensor.get_device,)
MOVES = (Tensor.to, Tensor.cpu, Tensor.cuda)
IN_PLACE = frozenset(("__setitem__", *(f"__i{each}__" for each in ARITHMETIC)))


class Carrier(Protocol):
    """Brings tensors from stage to stage."""

    def carry(self, number: int, tensor: Tensor, source: int, target: int) -> Tensor | None:
        """Bring transfer `number` to its target. Every rank calls it; it returns the tensor on the target's rank.

        Elsewhere than on the source's rank `tensor` is a stand-in.
        """

    def agreed(self, unit: Unit, call: UnitCall | None) -> UnitCall:
        """The call of a unit: this rank's own, or that of the rank of its stage. Raises if it is another unit's."""


class Program(TorchFunctionMode):
    """One run of a network's forward, in which this rank computes some stages only.

    [Note: one forward on many ranks]
    The author's forward is Python, and may do anything between its blocks: add skips, resize, read shapes. So every
    rank runs all of it. What differs is which tensors have values. A tensor belongs to the stage that has computed it.
    On the ranks of that stage it is real, on the others a stand-in on torch's meta device, with shape and dtype only.

        x = self.start(z)           stage 0        real on rank 0, a stand-in on rank 1
        y = self.middle(x)          stage 1        x goes from rank 0 to rank 1
        return self.end(y + x)      stage 1        x is there already

    A unit (see cutting.py) is computed by its own stage, and the others are told what it returns. Everything else is
    computed by the latest stage of its operands. As all ranks run the same code, all know of each tensor when it goes
    where: the rank that has it sends it, the rank that needs it receives it. So skips need no care.

    Tensors without a stage are real on all ranks: the network's inputs, and what is made from them alone.

    torch's own pipelining traces the network, or asks for one module a stage that takes what the last one returns.
    A trace has fixed what Python decides, noise among it. Its schedules compute the loss in the last stage. Here all
    ranks compute it, each of its own samples, through networks of other policies.
    """

    def __init__(self, pipe: Pipe, mine: Collection[int], carrier: Carrier) -> None:
        """This rank computes the stages `mine`."""
        super().__init__()
        self.pipe, self.mine, self.carrier = pipe, mine, carrier
        self.player, self.stage_of, self.device = pipe.player, pipe.stage_of, pipe.device
        self.same_stages = pipe.same_stages()
        # What has been carried, by id and target, in the order of transfers: the tensor, and what is there of it.
        self.carried: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}
        self.written: dict[int, tuple[Tensor, Unit]] = {}  # by id: what a unit of another stage has changed in place
        self.running = False  # a unit's call: torch works as usual
        self.whole_batch = ""  # a unit that has looked at the whole batch
        self.generators: dict[int, torch.Generator] = {}  # by which the forward has drawn

    # ---- where a tensor is ----

    def stage(self, tensor: Tensor) -> int | None:
        found = getattr(tensor, "_stage", None)
        return found if found is not None or not isinstance(tensor, nn.Parameter) else self.stage_of.get(id(tensor))

    def latest(self, leaves: Sequence[Any]) -> int | None:
        stages = [stage for leaf in leaves if isinstance(leaf, Tensor) and (stage := self.stage(leaf)) is not None]
        return max(stages, default=None)

    def moved_generator(self) -> bool:
        """Whether the forward has drawn by a generator that lives on. torch 2.11 has no weak reference to one."""
        *ours, fresh = map(sys.getrefcount, (*self.generators.values(), torch.Generator()))
        return max(ours, default=0) > fresh + 1  # it is in the dict, too

    def _carried(self, leaf: Any, target: int) -> Any:
        """A leaf as the target stage needs it. Elsewhere: as a stand-in."""
        if not isinstance(leaf, Tensor):
            return leaf
        source = self.stage(leaf)
        _, writer = self.written.get(id(leaf), (None, None))
        if writer is not None and writer.stage != target:
            raise UserError(
                f"player '{self.player}': '{writer.name}' changes in place what another stage uses after it; build its "
                f"first layer without inplace=True, or type {type_instead(self.player, 'zero3')}"
            )
        real = leaf if source is None else None
        if source is not None and source != target:
            if (id(leaf), target) not in self.carried:
                there = self.carrier.carry(len(self.carried), leaf, source, target)
                self.carried[id(leaf), target] = leaf, there
            _, real = self.carried[id(leaf), target]
        elif source is not None and target in self.mine:
            real = leaf
        if target in self.mine:
            return real
        return leaf if leaf.is_meta else Meta.of(leaf).stand_in()

    # ---- between units ----

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None and noise.here() is not None:
            self.generators[id(kwargs["generator"])] = kwargs["generator"]
        if self.running:
            return function(*args, **kwargs)
        leaves, form = pytree.tree_flatten((args, kwargs))
        stage = self.latest(leaves)
        if stage is None:
            return function(*args, **kwargs)
        name = getattr(function, "__name__", str(function))
        if function in WHERE or (function is Tensor.type and len(leaves) == 1):  # a stand-in would tell of itself
            return function(torch.empty(0, dtype=leaves[0].dtype, device=self.device))
        if function in MOVES and not any(isinstance(leaf, Tensor | torch.memory_format) for leaf in leaves[1:]):
            here = torch.empty(0, dtype=leaves[0].dtype, device=self.device)
            there = function(here, *args[1:], **kwargs)
            if there is here:
                return leaves[0]
            if there.device == here.device and there.dtype != here.dtype:  # a stand-in cannot be moved
                function, (leaves, form) = Tensor.to, pytree.tree_flatten(((leaves[0], there.dtype), {}))
        if name in WITH_A_VALUE:
            what = f"reads a value ({name}) between its blocks, which only one rank has; do that inside a block"
            raise self.pipe.refusal(what)
        if name in IN_PLACE or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace"):
            self._check_in_place(leaves, stage)
        args, kwargs = pytree.tree_unflatten([self._carried(leaf, stage) for leaf in leaves], form)
        if stage in self.mine:
            found = function(*args, **kwargs)
        else:
            why = (
                f"player '{self.player}': its forward calls {name} between its blocks, whose result depends on values "
                f"that only one rank of a pipeline has; do that inside a block ({{why}})"
            )
            with torch.no_grad(), explained(why, NotImplementedError, RuntimeError):
                found = function(*args, **kwargs)
        return self._marked(found, stage)

    def _check_in_place(self, leaves: list[Any], stage: int) -> None:
        """What is written must be a tensor of the stage that writes, and be on no other one."""
        first = next(leaf for leaf in leaves if isinstance(leaf, Tensor))
        if self.stage(first) != stage or any(number == id(first) for number, _ in self.carried):
            raise UserError(
                f"player '{self.player}': its forward changes a tensor in place between its blocks, which another "
                f"stage of the pipeline has; write x = x + y in place of x += y"
            )

    def _marked(self, found: Any, stage: int) -> Any:
        for leaf in pytree.tree_leaves(found):
            if isinstance(leaf, Tensor):
                vars(leaf)["_stage"] = stage
        return found

    # ---- units ----

    def call(self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a unit returns, computed by its own stage. `forward` is that of its module."""
        self.running = True
        try:
            return self._call(unit, forward, args, kwargs)
        finally:
            self.running = False

    def _call(self, unit: Unit, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        stage, (leaves, form) = unit.stage, pytree.tree_flatten((args, kwargs))
        if self.learns:
            refuse_checkpoint(self.player, f"'{unit.name}'")
        latest = self.latest(leaves)
        if latest is not None and latest > stage:
            raise self.pipe.refusal(
                f"calls '{unit.name}' of stage {stage} after a block of stage {latest}; a pipeline goes through its "
                f"stages once, in the order in which the network has its modules. Name blocks in the order of their "
                f"calls, Player(..., blocks=[...])"
            )
        carried = [self._carried(leaf, stage) for leaf in leaves]
        if stage not in self.mine:
            call = self.carrier.agreed(unit, None)
            self._wrote(unit, [leaves[number] for number in call.wrote])
            if (place := noise.here()) is not None:
                place.calls += call.draws
            found = [leaf.stand_in() if isinstance(leaf, Meta) else leaf for leaf in call.leaves]
            try:
                return self._marked(pytree.tree_unflatten(found, call.form), stage)
            except (TypeError, ValueError, RuntimeError) as error:
                raise UserError(
                    f"player '{self.player}': '{unit.name}' returns what cannot be made without its values, as a "
                    f"PackedSequence; keep that inside a block, or type {type_instead(self.player, 'zero3')} ({error})"
                ) from error
        return self._computed(unit, forward, leaves, carried, form)

    def _computed(
        self, unit: Unit, forward: Callable[..., Any], given: list[Any], carried: list[Any], form: Any
    ) -> Any:
        """What a unit of this rank returns. Its arguments are `given`, and `carried` to its stage."""
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in carried):
            raise UserError(
                f"player '{self.player}': '{unit.name}' gets a tensor that was made by a function that torch does not "
                f"see, such as an autograd.Function of your own; call that inside a block, or type "
                f"{type_instead(self.player, 'zero3')}"
            )
        self._check_attributes(unit)
        self._check_objects(unit, given)
        args, kwargs = pytree.tree_unflatten(carried, form)
        place = noise.here()
        before = 0 if place is None else place.calls
        versions = {n: version_of(each) for n, each in enumerate(carried) if isinstance(each, Tensor)}
        with self._inside(unit):
            dice = random_state.dice() if self.pipe.trying else None
            found = forward(*args, **kwargs)
        now, form_now = pytree.tree_flatten((args, kwargs))
        if form_now != form or any(one is not other for one, other in zip(now, carried, strict=True)):
            raise UserError(
                f"player '{self.player}': '{unit.name}' changes a list or dict that it is given, which other stages "
                f"would not see; let it return what is new, or type {type_instead(self.player, 'zero3')}"
            )
        if self.pipe.trying and random_state.dice() != dice:
            raise UserError(
                f"player '{self.player}': '{unit.name}' draws by NumPy or Python's random, which only the rank of its "
                f"stage would do; draw by torch, such as torch.rand(1), or between the blocks"
            )
        drawn = 0 if place is None else place.calls - before
        wrote = [number for number, version in versions.items() if version_of(carried[number]) != version]
        self._wrote(unit, [given[number] for number in wrote])
        leaves, form = pytree.tree_flatten(found)
        if unlike := [leaf for leaf in leaves if not isinstance(leaf, CARRIED)]:
            raise UserError(
                f"player '{self.player}': '{unit.name}' returns a {type(unlike[0]).__name__}, which other stages would "
                f"not see; return tensors, or lists or dicts of them, or type {type_instead(self.player, 'zero3')}"
            )
        told = [Meta.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.carrier.agreed(unit, UnitCall(unit.name, form, told, drawn, wrote))
        # A unit may return its input, which is a tensor of another stage, or its parameter.
        found = [leaf.view_as(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return self._marked(pytree.tree_unflatten(found, form), unit.stage)

    def _wrote(self, unit: Unit, changed: Sequence[Tensor]) -> None:
        """Note what a unit has changed in place, which only its own stage sees: that stage has it now."""
        for tensor in changed:
            if self.stage(tensor) is None and not any(tensor is buffer for buffer in self.pipe.network.buffers()):
                self._marked(tensor, unit.stage)
            elif self.stage(tensor) not in (None, unit.stage):
                self.written[id(tensor)] = tensor, unit

    def _check_objects(self, unit: Unit, given: Sequence[Any]) -> None:
        """What lies in an object, such as a dataclass, is not carried."""
        for each in given:
            inside = getattr(each, "__dict__", {}).values() if not isinstance(each, Tensor | nn.Module) else ()
            if any(isinstance(value, Tensor) and self.stage(value) not in (None, unit.stage) for value in inside):
                raise UserError(
                    f"player '{self.player}': '{unit.name}' gets a {type(each).__name__} with what a block of another "
                    f"stage has computed; give it the tensors themselves, or a list or dict of them, or type "
                    f"{type_instead(self.player, 'zero3')}"
                )

    def _check_attributes(self, unit: Unit) -> None:
        """What a unit gets as an argument is seen, and carried. What lies in its modules, as in MUNIT's, is not."""
        for module in unit.module.modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and self.stage(value) not in (None, unit.stage):
                    raise UserError(
                        f"player '{self.player}': '{unit.name}' has in its attribute '{name}' what a block of another "
                        f"stage has computed; pass that as an argument of its forward, or type "
                        f"{type_instead(self.player, 'zero3')}"
                    )

    def _inside(self, unit: Unit) -> AbstractContextManager[None]:
        """Around a unit of this rank: the batch is that of the pipeline."""

        def add(values: Tensor) -> Tensor:
            self.whole_batch = f"'{unit.name}'"
            return self.same_stages.add(values)

        same = self.same_stages
        return ranks.at(replace(same, add=add, of_gradients=same)) if self.several else nullcontext()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Around the network's forward. What looks at all ranks' samples cannot work outside of units."""

        def refuse(_: Tensor) -> Tensor:
            what = "adds up over the ranks (gan.ranks) between its blocks; do that inside a block"
            raise self.pipe.refusal(what)

        self.several, self.learns = ranks.more_than_one(), torch.is_grad_enabled()
        with ranks.summed_by(refuse, 0, 2) if self.several else nullcontext(), self:
            yield
