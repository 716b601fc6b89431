"""A call of a network in stages: first what goes where is found out, once; then it is a step of this rank's graph."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from gan.files.errors import UserError
from strategies import private
from strategies.advice import type_instead
from strategies.objects.content import copied, kind_of
from strategies.observers import OwnCollectives
from strategies.pipelining.cutting import Unit
from strategies.pipelining.passes import BackwardPass, ForwardPass, StageChunks, run
from strategies.pipelining.pipe import (
    OUTSIDE,
    Endpoint,
    ForwardPlan,
    Meta,
    Pipe,
    Transfer,
    UnitCall,
    another_way,
    in_bytes,
    refuse_checkpoint,
)
from strategies.pipelining.program import CARRIED, Program
from strategies.pipelining.request import ForwardRequest, as_result
from strategies.pipelining.writes import Buffers
from strategies.processes.lost_ranks import of_a_collective
from strategies.world import of_all

IN_STAGES = (
    "while player '{}' was tried under policy pipeline. Each rank runs its forward for a chunk of the samples, "
    "and a block on the rank of its stage alone. Tensors with a row for each sample in front are cut, all others are "
    "given whole. Elsewhere what a block returns has no values, and what it leaves in an attribute or object is not "
    "there. Let blocks get and return plain tensors with the samples in front; or type {}"
)


def call(pipe: Pipe, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What `forward` returns for this rank's samples. See [Note: a call through a pipeline]."""
    request = ForwardRequest(pipe, forward, args, kwargs)
    if request.graph:
        refuse_checkpoint(pipe.player, "its network")
    request.plan = plan = planned(request)
    if request.graph:
        # The anchor requires a gradient also on a rank whose own weights do not.
        anchor = torch.zeros((), requires_grad=True)
        *found, beside = _Piped.apply(request, anchor, *(request.leaves[n] for n in request.wanted), *request.weights)
        pipe.called += [beside] if any(request.learning) else []  # that of a learner, which will arm its loss
    else:
        found, _ = _forward(request)
    if request.place is not None:
        request.place.calls += request.draws
    leaves = list(plan.leaves)
    for number, tensor in zip(plan.outputs, found, strict=True):
        leaves[number] = tensor
    return pytree.tree_unflatten(leaves, plan.form)


def _forward(request: ForwardRequest) -> tuple[tuple[Tensor, ...], StageChunks]:
    """What the network returns for this rank's samples, and what its backward needs."""
    pipe, ahead = request.pipe, ForwardPass(request)
    waiting, pipe.waiting = pipe.waiting, None
    run(pipe, ahead, waiting)
    if waiting is not None:
        waiting.give()
    return ahead.outputs(), ahead.pieces


class _Piped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, request: ForwardRequest, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN001
        ctx.request = request
        found, ctx.pieces = _forward(request)
        outputs = zip(found, request.plan.outputs.values(), strict=True)
        ctx.mark_non_differentiable(*(each for each, output in outputs if not output.learns))
        ctx.set_materialize_grads(False)
        return *found, torch.zeros(())

    @staticmethod
    def backward(ctx, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        with torch.no_grad():
            found = _Piped._slopes(ctx, *slopes)
        if not torch.is_grad_enabled():
            return found
        # torch's once_differentiable says nothing where only the network has a part in the second derivative.
        anchor = torch.zeros((), requires_grad=True)
        return tuple(None if each is None else _Constant.apply(ctx.request.pipe.player, anchor, each) for each in found)

    @staticmethod
    def _slopes(ctx, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        request, pipe = ctx.request, ctx.request.pipe
        if not ctx.pieces:
            raise UserError(
                f"player '{pipe.player}': backward goes a second time through one call of its network, and under "
                f"policy 'pipeline' what it needs is kept for one; type {type_instead(pipe.player, 'zero3')}"
            )
        pipe.finish()
        pieces, ctx.pieces = ctx.pieces, {}
        waiting = BackwardPass(request, pieces, slopes[:-1])
        if pipe.overlaps and not pipe.last and not request.wanted:
            pipe.waiting = waiting  # it will give the weights their gradients
            return (None,) * (2 + len(request.weights))
        waiting.run()
        return None, None, *waiting.slopes()


class _Constant(torch.autograd.Function):
    """A gradient that has come through a pipeline. It cannot be differentiated."""

    @staticmethod
    def forward(ctx, player: str, anchor: Tensor, slope: Tensor) -> Tensor:  # noqa: ANN001
        ctx.player = player
        return slope.view_as(slope)

    @staticmethod
    def backward(ctx, slope: Tensor) -> tuple[None, ...]:  # noqa: ANN001
        raise UserError(
            f"player '{ctx.player}': a loss differentiates a gradient that has come through its network "
            f"(create_graph=True), which does not go through a pipeline; type {type_instead(ctx.player, 'zero3')}"
        )


# ---- what goes from stage to stage ----


def planned(request: ForwardRequest) -> ForwardPlan:
    """The plan of a call. If some unit looks at the whole batch, the call gets one chunk."""
    pipe = request.pipe
    if request.key not in pipe.plans:
        for name, weight in pipe.network.named_parameters():
            if private.weight_hooks(weight):  # torch would call it in a stage's backward, and again in the whole one
                raise UserError(
                    f"player '{pipe.player}': weight '{name}' has a hook that changes its gradient, which does not go "
                    f"through a pipeline; write on_before_optimizer_step(self, optimizer), or type "
                    f"{type_instead(pipe.player, 'zero3')}"
                )
            if pipe.overlaps and private.post_accumulate_hooks(weight):  # torch would call it without a gradient
                raise UserError(
                    f"player '{pipe.player}': weight '{name}' has a hook that sees its gradient, which schedule:1f1b "
                    f"adds up later; leave +schedule:1f1b out"
                )
        # Found before anything runs: a chunk may have one sample, which a batch norm refuses.
        whole_batch = _with_statistics(pipe) if request.chunks > 1 else ""
        plan = ForwardPlan(whole_batch=whole_batch) if whole_batch else Discovery(request).plan()
        if plan.whole_batch and request.chunks > 1:
            if pipe.chunks is not None:
                raise UserError(
                    f"player '{pipe.player}': {plan.whole_batch} looks at the whole batch, so a pipeline cannot cut it "
                    f"into {pipe.chunks} chunks; type {pipe.player}=pipeline+chunks:1, and Phase(micro_batches=...) if "
                    f"memory is short"
                )
            pipe.whole_batch, request.chunks = True, 1
            return planned(request)
        pipe.plans[request.key] = plan
    return pipe.plans[request.key]


def _with_statistics(pipe: Pipe) -> str:
    """A unit with a batch norm that takes statistics; "" if there is none."""
    for unit in pipe.units:
        norms = (each for each in unit.module.modules() if isinstance(each, _BatchNorm))
        if any(norm.training or norm.running_mean is None for norm in norms):
            return f"'{unit.name}'"
    return ""


class Discovery:
    """A run of one chunk, by all ranks at once, that makes the plan. What it writes into buffers is undone.

    The ranks meet wherever one needs another. So what one rank refuses, or does in another way, all refuse together.
    """

    def __init__(self, request: ForwardRequest) -> None:
        self.request, self.pipe = request, request.pipe
        self.made = ForwardPlan()
        self.refused = False  # by all ranks
        self.sent: dict[Endpoint, Tensor] = {}  # what this rank's stages pass on, or return
        self.got: dict[Endpoint, Tensor] = {}  # what they get from others

    def plan(self) -> ForwardPlan:
        plan, rows = self.made, self.request.bounds(0)[1]
        leaves, program, buffers = self.tried(0)
        written = buffers.written
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, CARRIED):
                raise self.pipe.refusal(f"returns a {type(leaf).__name__}; return tensors, or lists or dicts of them")
            plan.leaves.append(None if isinstance(leaf, Tensor) else leaf)
            if isinstance(leaf, Tensor):
                if not leaf.dim() or len(leaf) != rows:
                    several = leaf.dim() > 1 and not len(leaf) % rows
                    advice = "return the rows of each batch apart" if several else "return a mean for each sample"
                    raise self.pipe.refusal(
                        f"returns a tensor of shape {tuple(leaf.shape)}, not a row for each sample; {advice}"
                    )
                source = program.stage(leaf) or 0
                plan.outputs[number] = Transfer(source, OUTSIDE, Meta.of(leaf), leaf.requires_grad)
                if source in self.pipe.mine():
                    self.sent["output", number] = leaf
        self._agree(list(written), bool(buffers.assigned()), program.whole_batch)
        if plan.written and self.request.chunks > 1 and not plan.whole_batch:
            self._compare_chunks(written)
        return plan

    def _refuse_collective(self, where: str) -> None:
        raise self.pipe.refusal(
            f"calls torch.distributed ({where}), and other ranks do not come there; take gan.ranks.sum(x), "
            f"gan.ranks.mean(x) or gan.ranks.gather(x)"
        )

    def tried(self, chunk: int) -> tuple[list[Any], Program, Buffers]:
        """What the forward of a chunk returns, its program, and what it has written."""
        program, inputs = Program(self.pipe, self.pipe.mine(), self), self.request.inputs()
        buffers = Buffers(self.pipe, dict(self.pipe.network.named_buffers()))
        before = {weight: copied(weight) for weight in buffers.weights}
        try:
            with buffers.chunk(), OwnCollectives(self._refuse_collective):
                leaves, self.made.form, _ = self.request.run(program, inputs, chunk)
            self._meet(f"returns after {self.request.draws} random draws")
        except Exception as error:
            if not isinstance(error, UserError):
                error.add_note(IN_STAGES.format(self.pipe.player, type_instead(self.pipe.player, "zero3")))
            if not self.refused and not of_a_collective(error):  # else another rank may be gone
                self._meet("", failure=error)
            raise
        buffers.attributes.put_back()
        for weight, values in before.items():
            kind_of(weight).fill(weight, values)
        return leaves, program, buffers

    def _compare_chunks(self, written: Mapping[str, Tensor]) -> None:
        """A buffer in which each chunk writes something else depends on samples: then all must come at once."""
        _, _, again = Discovery(self.request).tried(1)
        both, names = written.keys() & again.written.keys(), {**written, **again.written}
        unlike = [name for name in names if name not in both or not torch.equal(written[name], again.written[name])]
        everyone = of_all(unlike, self.pipe.group)
        self.made.whole_batch = next((f"buffer '{name}'" for names in everyone for name in names), "")

    def _agree(self, written: list[str], notes: bool, whole_batch: str) -> None:
        """Tell all ranks what only the rank of a stage knows. A stand-in says that no gradient comes back."""
        plan, moved = self.made, [*self.made.transfers, *self.made.outputs.values()]
        reached = {place: _reached(tensor, self.got) for place, tensor in self.sent.items()}
        everyone = of_all(([each.learns for each in moved], written, notes, whole_batch, reached), self.pipe.group)
        for number, each in enumerate(moved):
            each.learns = any(learns[number] for learns, *_ in everyone)
        plan.written = {rank: names for rank, (_, names, *_) in enumerate(everyone) if names}
        plan.noting = [rank for rank, (_, _, noting, *_) in enumerate(everyone) if noting]
        plan.whole_batch = next((unit for *_, unit, _ in everyone if unit), "")
        steps = {place: found for *_, each in everyone for place, found in each.items()}
        for number in plan.outputs:
            plan.reached[number] = _all_from(("output", number), lambda place: steps.get(place, ()))

    def _meet(self, where: str, own: Any = None, failure: Exception | None = None) -> list[Any]:
        """What each rank has here. All ranks raise the same if one fails, or if they are not at one place.

        An error of the author's code comes first: a stand-in fails where that does, and gives another reason.
        """
        told = None if failure is None else (isinstance(failure, UserError), str(failure))
        everyone = of_all((where, own, told), self.pipe.group)
        places = list(dict.fromkeys(where for where, _, _ in everyone))
        failures = sorted((each for _, _, each in everyone if each is not None), key=lambda each: each[0])
        if len(places) > 1 and not failures:
            way = another_way(self.pipe.player, f"{places[0]} on one rank where it {places[1]} on another")
            failures = [(True, str(way))]
        if failures:
            self.refused = True
            refused, why = failures[0]
            if told != failures[0]:
                raise (UserError if refused else RuntimeError)(why)
        return [own for _, own, _ in everyone]

    # ---- as carrier ----

    def carry(self, number: int, tensor: Tensor, source: int, target: int) -> Tensor | None:
        pipe = self.pipe
        self.made.transfers.append(Transfer(source, target, Meta.of(tensor), tensor.requires_grad))
        sender, receiver = pipe.rank_of(source), pipe.rank_of(target)
        where = f"passes a tensor from stage {source} to stage {target}"
        everyone = self._meet(where, (tensor.requires_grad, tensor.dtype))
        (learns, dtype), (_, expected) = everyone[sender], everyone[receiver]
        if dtype != expected:
            raise UserError(
                f"player '{pipe.player}': a tensor between its blocks is {dtype} on its stage, and would be "
                f"{expected} without autocast; compute it inside a block"
            )
        if pipe.rank == sender:
            self.sent["transfer", number] = tensor
            if sender != receiver:
                dist.send(in_bytes(tensor.detach().contiguous()), group=pipe.group, group_dst=receiver)
        if pipe.rank != receiver:
            return None
        received = tensor.detach().clone() if sender == receiver else Meta.of(tensor).empty(pipe.device)
        if sender != receiver:
            dist.recv(in_bytes(received), group=pipe.group, group_src=sender)
        self.got["transfer", number] = received
        return as_result(received.requires_grad_()) if learns else received

    def agreed(self, unit: Unit, call: UnitCall | None) -> UnitCall:
        found = self._meet(f"calls '{unit.name}'", call)[self.pipe.rank_of(unit.stage)]
        self.made.calls.append(found)
        return found


def _reached(tensor: Tensor, leaves: Mapping[Endpoint, Tensor]) -> set[Endpoint]:
    """The leaves to which the gradient of a tensor comes. A backward would meet other ranks, so the graph is read."""
    nodes = _all_from(tensor.grad_fn, lambda node: () if node is None else (inner for inner, _ in node.next_functions))
    ends = {id(tensor), *(id(getattr(node, "variable", None)) for node in nodes)}
    return {place for place, leaf in leaves.items() if id(leaf) in ends}


def _all_from(first: Hashable, next_of: Callable[[Any], Iterable[Any]]) -> set[Any]:
    """All that can be reached from the first, step by step."""
    found, pending = {first}, [first]
    while pending:
        new = set(next_of(pending.pop())) - found
        found |= new
        pending += new
    return found
