"""A call of a network in stages, as one step of this rank's graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from gan.files.errors import UserError
from strategies.pipelining.discovery import planned
from strategies.pipelining.passes import BackwardPass, ForwardPass, Pieces, run
from strategies.pipelining.pipe import Pipe
from strategies.pipelining.program import Plan
from strategies.pipelining.request import Request


def call(pipe: Pipe, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What `forward` returns for this rank's samples. See [Note: a call through a pipeline]."""
    request = Request(pipe, forward, args, kwargs)
    plan = planned(request)
    made = Made(request, plan)
    if request.graph:
        # The anchor requires a gradient also on a rank whose own weights do not.
        anchor = torch.zeros((), requires_grad=True)
        found = _Piped.apply(made, anchor, *(request.leaves[n] for n in request.wanted), *request.weights)
    else:
        found = made.forward()
    if request.place is not None:
        request.place.calls += plan.draws
    tensors = iter(found)
    leaves = [leaf if where is None else next(tensors) for where, leaf in zip(plan.outputs, plan.leaves, strict=True)]
    return pytree.tree_unflatten(leaves, plan.form)


class Made:
    """A call and what its backward needs."""

    def __init__(self, request: Request, plan: Plan) -> None:
        self.request, self.plan, self.pipe = request, plan, request.pipe
        self.pieces: Pieces = {}
        self.learns = [where[1].learns for where in plan.outputs if where is not None]

    def forward(self) -> tuple[Tensor, ...]:
        ahead = ForwardPass(self.request, self.plan)
        waiting, self.pipe.waiting = self.pipe.waiting, None
        run(self.pipe, ahead, waiting)
        if waiting is not None:
            waiting.give()
        self.pieces = ahead.pieces
        if not self.request.alone:
            self.pipe.balance.called()
        return ahead.outputs()

    def backward(self, slopes: tuple[Tensor | None, ...]) -> list[Tensor | None]:
        pipe, request = self.pipe, self.request
        if not self.pieces:
            raise UserError(
                f"player '{pipe.player}': backward goes a second time through one call of its network, and under "
                f"policy 'pipeline' what it needs is kept for one; type --strategy {pipe.player}=zero3"
            )
        pipe.finish()
        pieces, self.pieces = self.pieces, {}
        waiting = BackwardPass(request, self.plan, pieces, slopes)
        if pipe.overlaps and not pipe.last and not request.wanted:
            pipe.waiting = waiting  # it will give the weights their gradients
            return [None] * len(request.weights)
        waiting.run()
        return waiting.slopes()


class _Piped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, made: Made, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN001
        ctx.made = made
        found = made.forward()
        ctx.mark_non_differentiable(*(each for each, learns in zip(found, made.learns, strict=True) if not learns))
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx, *slopes: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN001
        return None, None, *ctx.made.backward(slopes)
